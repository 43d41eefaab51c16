"""The engine under autograd: every way to ask for a gradient, and who owns which memory."""

import copy
import gc
import os
import weakref
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, _core, explain


class Net(nn.Module):
    """A loss, outputs before it, an input handed through, a number."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.aside = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x, labels):
        hidden = torch.tanh(self.a(x))
        scores = self.b(hidden)
        return {
            "loss": nn.functional.cross_entropy(scores, labels),
            "hidden": hidden,
            "again": hidden,
            "best": scores.argmax(-1),
            "aside": self.aside(hidden),
            "x": x,
            "rows": x.shape[0],
            "weight": self.a.weight,
        }


class Pair:
    """One module in the engine and in PyTorch, with equal inputs of their own."""

    def __init__(self, module=None):
        torch.manual_seed(0)
        self.eager = module or Net()
        self.ours = ORTModule(copy.deepcopy(self.eager))
        self.labels = torch.tensor([0, 1, 2, 0, 1])

    def x(self):
        return torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def compare(self, scenario):
        """`scenario(module, x, labels)` leaves and returns the same in both."""
        results = []
        for module in (self.ours, self.eager):
            module.zero_grad()
            x = self.x()
            results.append((scenario(module, x, self.labels), x.grad, [p.grad for p in module.parameters()]))
        assert_same(*results)
        assert explain(self.ours).captured
        return results[0][0]


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(a, dict):
        assert_same(list(a.items()), list(b.items()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert type(a) is type(b) and a == b


SCENARIOS = []


def scenario(function):
    SCENARIOS.append(function)
    return function


@scenario
def loss(module, x, labels):
    output = module(x, labels)
    output["loss"].backward()
    return {k: v for k, v in output.items() if k != "weight"}


@scenario
def another_output(module, x, labels):
    module(x, labels)["hidden"].pow(2).sum().backward()


@scenario
def several_outputs(module, x, labels):
    output = module(x, labels)
    (output["loss"] + output["aside"].sum()).backward()


@scenario
def now_this_now_that(module, x, labels):
    module(x, labels)["loss"].backward()
    module(x, labels)["aside"].sum().backward()
    module(x, labels)["loss"].backward()


@scenario
def retained(module, x, labels):
    value = module(x, labels)["loss"]
    value.backward(retain_graph=True)
    value.backward()


@scenario
def retained_for_another_output(module, x, labels):
    output = module(x, labels)
    output["aside"].sum().backward(retain_graph=True)
    output["loss"].backward(retain_graph=True)
    output["hidden"].sum().backward()


@scenario
def two_forwards_then_their_backwards(module, x, labels):
    first, second = module(x, labels)["loss"], module(x * 2, labels)["loss"]
    second.backward()
    first.backward()


@scenario
def two_forwards_backwards_in_order(module, x, labels):
    first, second = module(x, labels)["loss"], module(x * 2, labels)["loss"]
    first.backward()
    second.backward()


@scenario
def functional_gradients(module, x, labels):
    return torch.autograd.grad(module(x, labels)["loss"], [x, module.b.weight])


@scenario
def some_inputs_only(module, x, labels):
    module(x, labels)["loss"].backward(inputs=[module.a.weight])


@scenario
def double_backward(module, x, labels):
    (g,) = torch.autograd.grad(module(x, labels)["loss"], x, create_graph=True)
    g.pow(2).sum().backward()


@scenario
def hooks_on_parameters(module, x, labels):
    seen = {"a": None, "b": None}
    handles = [
        module.a.weight.register_hook(lambda g: seen.update(a=g.clone())),
        module.b.weight.register_post_accumulate_grad_hook(lambda p: seen.update(b=p.grad.clone())),
    ]
    module(x, labels)["loss"].backward()
    for handle in handles:
        handle.remove()
    return seen


@scenario
def hook_that_changes_a_gradient(module, x, labels):
    handle = module.a.weight.register_hook(lambda g: g * 2)
    module(x, labels)["loss"].backward()
    handle.remove()


@scenario
def gradients_of_outputs(module, x, labels):
    output = module(x, labels)
    output["hidden"].retain_grad()
    (output["hidden"] * 2).sum().backward()
    return output["hidden"].grad


@scenario
def accumulated(module, x, labels):
    for factor in (1, 2, 3):
        (module(x, labels)["loss"] * factor).backward()


@scenario
def no_grad(module, x, labels):
    with torch.no_grad():
        output = module(x, labels)
    return [output["hidden"], output["hidden"].requires_grad, output["loss"].requires_grad]


@scenario
def inference_mode(module, x, labels):
    with torch.inference_mode():
        return module(x, labels)["loss"].clone()


@scenario
def without_gradient_of_the_input(module, x, labels):
    output = module(x.detach(), labels)
    output["loss"].backward()
    return [output["best"].requires_grad, output["hidden"].requires_grad, output["hidden"].is_leaf]


@scenario
def partly_frozen(module, x, labels):
    module.a.requires_grad_(False)
    module(x.detach(), labels)["loss"].backward()
    frozen = module(x.detach(), labels)["hidden"].requires_grad
    module.a.requires_grad_(True)
    return frozen


@scenario
def all_frozen(module, x, labels):
    module.requires_grad_(False)
    output = module(x.detach(), labels)
    module.requires_grad_(True)
    return output["loss"].requires_grad


@scenario
def strided_input(module, x, labels):
    wide = torch.stack([x, x * 0], -1)[..., 0]
    assert not wide.is_contiguous()
    module(wide, labels.repeat_interleave(2)[::2])["loss"].backward()


@scenario
def leaf_that_is_expanded(module, x, labels):
    row = torch.ones(1, 4, requires_grad=True)
    module(row.expand(5, 4), labels)["loss"].backward()
    return row.grad


@scenario
def output_changed_in_place(module, x, labels):
    output = module(x, labels)
    output["aside"].mul_(3)
    output["aside"].sum().backward()


@scenario
def half_of_the_gradients_is_none(module, x, labels):
    """What the loss does not depend on has no gradient, rather than a gradient of zeros."""
    module(x, labels)["loss"].backward()
    return [p.grad is None for p in module.parameters()]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
def test_as_in_pytorch(scenario):
    Pair().compare(scenario)


def test_one_after_the_other():
    """The same module through all scenarios: what one leaves behind disturbs no other."""
    pair = Pair()
    for scenario in (*SCENARIOS, *reversed(SCENARIOS)):
        pair.compare(scenario)


# --- errors that are PyTorch's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda module, x, output: x.add_(1),
        lambda module, x, output: module.b.weight.mul_(2),
        lambda module, x, output: output["hidden"].add_(1),
    ],
    ids=["input", "parameter", "output"],
)
def test_editing_what_backward_needs(change):
    for module in (Pair().ours, Pair().eager):
        x = torch.randn(5, 4)
        output = module(x, torch.zeros(5, dtype=torch.int64))
        with torch.no_grad():
            change(module, x, output)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output["loss"].backward()


def test_second_backward():
    for module in (Pair().ours, Pair().eager):
        value = module(torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))["loss"]
        value.backward()
        with pytest.raises(RuntimeError, match="retain_graph"):
            value.backward()


class Failing:
    """A plan whose backward fails."""

    def __init__(self, plan):
        self.plan = plan

    def __getattr__(self, name):
        return getattr(self.plan, name)

    def backward(self, *given, **named):
        raise _core.EngineError("no such luck")


@pytest.mark.parametrize("retain", [True, False])
def test_retain_graph_holds_after_an_error_of_the_engine(retain):
    """PyTorch computes these gradients, and those of the next backward, where the graph was to be kept."""
    pair = Pair()
    x, labels = torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    pair.ours(x, labels)["loss"].backward()
    pair.ours.zero_grad()
    for executable in pair.ours._ortmodule.latest.plans.values():
        executable.plan = Failing(executable.plan)
    found = []
    for module in (pair.ours, pair.eager):
        value = module(x, labels)["loss"]
        with pytest.warns(UserWarning, match="no such luck") if module is pair.ours else nullcontext():
            value.backward(retain_graph=retain)
        with nullcontext() if retain else pytest.raises(RuntimeError, match="retain_graph"):
            value.backward()
        found.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(*found)


def test_bad_input_is_pytorchs_error():
    pair = Pair()
    pair.ours(pair.x(), pair.labels)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pair.ours(torch.randn(5, 7), pair.labels)
    with pytest.raises(TypeError, match="labels"):
        pair.ours(torch.randn(5, 4))
    with pytest.raises(IndexError):
        pair.ours(pair.x(), pair.labels + 100)
    pair.ours(pair.x(), pair.labels)
    assert explain(pair.ours).captured


# --- memory -----------------------------------------------------------------------------------------------------------


def test_results_are_kept():
    """No later step overwrites an output or a gradient that the caller kept."""
    pair = Pair()
    outputs, gradients = [], []
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        output = pair.ours(x, pair.labels)
        outputs.append((output["hidden"], output["hidden"].detach().clone()))
        g = torch.autograd.grad(output["loss"], pair.ours.a.weight)[0]
        gradients.append((g, g.clone()))
    for kept, then in outputs + gradients:
        assert torch.equal(kept, then)


def test_nothing_is_held():
    pair = Pair()
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            x = pair.x()
            output = pair.ours(x, pair.labels)
            if backward:
                output["loss"].backward()
            parts = [weakref.ref(output[name]) for name in ("loss", "hidden")] + [weakref.ref(x)]
            del output, x
            assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="nothing is kept: the sanitizer watches")
def test_memory_is_used_again():
    """Arenas and gradients of 4 MB and more: no step takes more from the system than the first two did."""
    ours = ORTModule(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)))
    x, held = torch.randn(1024, 1024), []
    for _ in range(6):
        ours(x).sum().backward()
        ours.zero_grad()
        state = _core.memory()
        held.append(state["used"] + state["kept"])
        assert held[-1] <= state["peak"]
    assert held[0] > 8e6 and held[-1] == held[1]
    del ours
    gc.collect()
    assert _core.memory()["kept"] == 0


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="nothing is kept: the sanitizer watches")
@pytest.mark.parametrize("segments", ["0", "1"])
def test_memory_goes_back_after_backward(segments):
    """But for gradients, and with `retain_graph` for what another backward reads; gradients have the same bits."""
    found = {}
    for keep in (True, False):
        torch.manual_seed(0)
        config = Config(keep_memory=keep, enable_mem_efficient_grad_mgmt=segments)
        ours = ORTModule(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), config=config)
        x = torch.randn(2048, 1024)
        for _ in range(2):
            loss = ours(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            gradients = sum(p.grad.nbytes for p in ours.parameters())  # another one's were added to these
            assert (_core.memory()["kept"] < gradients + 1e6) == (not keep)
        found[keep] = [p.grad for p in ours.parameters()]
        del ours, loss
    for ours, theirs in zip(found[False], found[True], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:ORTModule")
@pytest.mark.parametrize("fails", ["not at all", "at two rows", "where it waits for memory"])
def test_the_first_call_leaves_nothing_to_the_garbage_collector(fails):
    """Errors of the captures that were tried know their frames, and those the caller's tensors."""

    class Tries(nn.Linear):
        def forward(self, x):
            if fails == "at two rows":
                x = x.reshape(-1, 24).reshape(-1, 8)
            elif fails == "where it waits for memory":
                numpy.copyto((y := torch.empty(4, 8)).numpy(), 1)
                x = x + y.clamp_min(0)
            return super().forward(x)

    ours = ORTModule(Tries(8, 2))
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(6, 4, 8, requires_grad=True)
        y = ours(x)
        y.sum().backward()
        living = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [tensor() for tensor in living] == [None, None]
    finally:
        gc.enable()


def test_identities():
    pair = Pair()
    x = pair.x()
    output = pair.ours(x, pair.labels)
    assert output["x"] is x and output["hidden"] is output["again"]
    assert output["weight"] is pair.ours.a.weight and type(output["rows"]) is int


# --- what forward writes ----------------------------------------------------------------------------------------------


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.plain = torch.zeros(2)

    def forward(self, x):
        y = self.norm(x) + self.seen
        self.seen.add_(x.detach().abs().sum(0))
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.plain += 1
        return y


def test_buffers_are_written_every_time():
    torch.manual_seed(0)
    eager = Writes()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(4):
        if step == 3:
            ours.eval(), eager.eval()
        x = torch.randn(6 + step % 2, 4)
        found, expected = ours(x), eager(x)
        torch.testing.assert_close(found, expected)
        if found.requires_grad:
            found.sum().backward(), expected.sum().backward()
        assert_same(dict(ours.named_buffers()), dict(eager.named_buffers()))
        assert torch.equal(ours.plain, eager.plain)
    assert explain(ours).captured and explain(ours).exports == 2
    assert_same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])


def test_inputs_are_written():
    class Adds(nn.Module):
        def forward(self, x, state):
            state += x.detach().sum(0)
            return x * state

    ours, eager = ORTModule(Adds()), Adds()
    states = torch.zeros(3), torch.zeros(3)
    for n in (2, 5):
        x = torch.randn(n, 3)
        torch.testing.assert_close(ours(x, states[0]), eager(x, states[1]))
        torch.testing.assert_close(*states)
    assert explain(ours).captured


def test_a_write_shows_in_the_version():
    ours = ORTModule(nn.BatchNorm1d(3))
    ours(torch.randn(4, 3))
    before = ours.running_mean._version
    ours(torch.randn(4, 3))
    assert ours.running_mean._version > before
