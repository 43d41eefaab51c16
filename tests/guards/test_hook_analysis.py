"""Hooks of every kind run in every step, with the values that PyTorch gives them."""

import copy
import functools
import weakref
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ortmodule import ORTModule, explain
from ortmodule.guards import hook_analysis


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.second = nn.Linear(6, 2)

    def forward(self, x):
        return self.second(self.first(x)).pow(2)


pytestmark = pytest.mark.filterwarnings("ignore")


def rows(n, seed=0):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def forward_hook(seen, module):
    return module.register_forward_hook(lambda m, args, out: seen.append(("f", args[0].detach(), out.detach())))


def forward_pre_hook(seen, module):
    return module.register_forward_pre_hook(lambda m, args: seen.append(("p", args[0].detach())))


def full_backward_hook(seen, module):
    return module.register_full_backward_hook(lambda m, i, o: seen.append(("b", [g.clone() for g in (*i, *o)])))


def full_backward_pre_hook(seen, module):
    return module.register_full_backward_pre_hook(lambda m, o: seen.append(("q", o[0].clone())))


def changing_hook(seen, module):
    return module.register_forward_hook(lambda m, args, out: out * 2)


def changing_backward_hook(seen, module):
    return module.register_full_backward_hook(lambda m, i, o: tuple(g * 3 for g in i))


def kwargs_hook(seen, module):
    return module.register_forward_hook(lambda m, args, kwargs, out: seen.append(("k", out.detach())), with_kwargs=True)


HOOKS = [forward_hook, forward_pre_hook, full_backward_hook, full_backward_pre_hook, changing_hook]
HOOKS += [changing_backward_hook, kwargs_hook]


@pytest.mark.parametrize("place", ["", "first", "first.0", "second"])
@pytest.mark.parametrize("hook", HOOKS, ids=lambda f: f.__name__)
def test_hooks_registered_after_capture(hook, place):
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    found = []
    for module in (ours, eager):
        seen, values = [], []
        for step in range(5):
            if step == 1:
                handle = hook(seen, module.get_submodule(place))
            if step == 4:
                handle.remove()
            module.zero_grad()
            x = rows(3 + step % 2, step)
            y = module(x)
            y.sum().backward()
            values += [y, x.grad, *(p.grad for p in module.parameters())]
        assert len(seen) == (0 if "changing" in hook.__name__ else 3)
        found.append((values, seen))
    torch.testing.assert_close(*[values for values, _ in found])
    for ours_seen, eager_seen in zip(found[0][1], found[1][1], strict=True):
        assert ours_seen[0] == eager_seen[0]
        torch.testing.assert_close(ours_seen[1:], eager_seen[1:])
    # A graph in which PyTorch runs the submodule is another one, but `first` has most of the weights: PyTorch has the
    # whole module, unless the hook becomes a part of the graph. Hooks of the root run around it.
    another = place == "second" or (place and hook is changing_hook)
    assert explain(ours).captured and explain(ours).exports == (2 if another else 1)


def test_hooks_registered_before_wrapping():
    torch.manual_seed(0)
    eager = Net()
    ours = copy.deepcopy(eager)
    counts = [[], []]
    for module, seen in zip((ours, eager), counts, strict=True):
        module.first[0].register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.sum().item()))
    ours = ORTModule(ours)
    for step in range(3):
        ours(rows(3, step)), eager(rows(3, step))
    assert len(counts[0]) == 3
    torch.testing.assert_close(*counts)


@pytest.mark.parametrize(
    "register",
    [nn_module.register_module_forward_hook, nn_module.register_module_forward_pre_hook,
     nn_module.register_module_full_backward_hook, nn_module.register_module_full_backward_pre_hook],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_global_hooks(register):
    torch.manual_seed(0)
    ours = ORTModule(Net())
    ours(rows(3))
    names = []
    handle = register(lambda m, *args: names.append(type(m).__name__))
    try:
        for _ in range(2):
            ours(rows(3)).sum().backward()
    finally:
        handle.remove()
    assert sorted(names) == sorted(["Linear", "Linear", "Net", "Sequential", "Tanh"] * 2)
    ours(rows(3))
    assert explain(ours).captured and explain(ours).exports == 1


def test_hooks_of_parameters():
    def scenario(module):
        seen = []
        weights = [module.first[0].weight, module.second.weight, module.second.bias]
        handles = [
            weights[0].register_hook(lambda g: g * 2),
            weights[1].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
            weights[2].register_hook(lambda g: seen.append(g.clone())),
        ]
        for step in range(2):
            module(rows(3, step)).sum().backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == 4
        order = sorted(seen, key=lambda t: t.dim())
        return order, [p.grad for p in module.parameters()]

    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    torch.testing.assert_close(scenario(ours), scenario(eager))
    assert explain(ours).captured


def test_a_fused_optimizer_in_backward():
    """The optimizer steps in post-accumulate hooks: parameters change while backward runs."""
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    for module in (ours, eager):
        for p in module.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for i in range(4):
            module(rows(3, i)).sum().backward()
    torch.testing.assert_close(list(ours.parameters()), list(eager.parameters()))
    assert explain(ours).captured and explain(ours).exports == 1


def test_hooks_of_outputs():
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    found = []
    for module in (ours, eager):
        y = module(rows(3))
        y.register_hook(lambda g: g * 2)
        y.retain_grad()
        y.sum().backward()
        found.append([y.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*found)


def test_hooks_of_states():
    """State dict and load hooks belong to the module."""
    ours = ORTModule(Net())
    calls = []
    ours.first.register_state_dict_post_hook(lambda *args: calls.append("s"))
    ours.register_load_state_dict_post_hook(lambda *args: calls.append("l"))
    ours.load_state_dict(ours.state_dict())
    assert calls == ["s", "l"]
    ours(rows(3))
    assert explain(ours).captured


# --- hooks that are a part of forward ---------------------------------------------------------------------------------

collector = ContextVar("collector", default=None)


def collect(module, args, out):
    found = collector.get()
    if found is not None:
        found["states"].append(out)


class Collecting(nn.Module):
    """Gives back what its layers compute, which hooks collect that its first forward puts there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, states=True):
        if states and not getattr(self, "has_hooks", False):
            self.has_hooks = True
            for layer in self.layers:
                layer.register_forward_hook(collect)
        found = {"states": []}
        token = collector.set(found if states else None)
        try:
            for layer in self.layers:
                x = layer(x).tanh()
        finally:
            collector.reset(token)
        return x, tuple(found["states"])


def agree_on_states(ours, eager, steps=range(4), **settings):
    for step in steps:
        found = []
        for module in (ours, eager):
            module.zero_grad()
            x = rows(3 + step % 2, step)
            y, states = module(x, **settings)
            (y.sum() + sum((s * s).sum() for s in states)).backward()
            found.append((y, states, x.grad, [p.grad for p in module.parameters()]))
        assert len(found[0][1]) == (3 if settings.get("states", True) else 0)
        torch.testing.assert_close(*found)


def test_hooks_that_forward_installs():
    torch.manual_seed(0)
    eager = Collecting()
    ours = ORTModule(copy.deepcopy(eager))
    agree_on_states(ours, eager)
    report = explain(ours)
    assert report.captured and report.exports == 1 and not report.python_ops
    assert [len(layer._forward_hooks) for layer in ours.layers] == [1, 1, 1]
    agree_on_states(ours, eager, states=False)
    agree_on_states(ours, eager)
    assert explain(ours).captured and not explain(ours).python_ops


@pytest.mark.parametrize("first", [False, True], ids=["behind", "before"])
def test_other_hooks_beside_those_that_collect(first):
    torch.manual_seed(0)
    eager = Collecting()
    ours = ORTModule(copy.deepcopy(eager))
    seen = [], []
    if not first:
        agree_on_states(ours, eager)
    for module, kept in zip((ours, eager), seen, strict=True):
        module.layers[1].register_forward_hook(lambda m, args, out, kept=kept: (kept.append(out.detach()), out * 3)[1])
    agree_on_states(ours, eager)
    assert len(seen[0]) == 4
    torch.testing.assert_close(*seen)
    # Behind another hook, collecting is still part of the graph; before it, it cannot be.
    assert explain(ours).captured == first


def test_a_constant_that_a_hook_reads():
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    factor = 2.0

    def scaled(module, args, out):
        return out * factor

    for module in (ours, eager):
        module.first[0].register_forward_hook(scaled)
    for step in range(6):
        factor = 2.0 + step // 2
        torch.testing.assert_close(ours(rows(3, step)), eager(rows(3, step)))
    assert explain(ours).captured and explain(ours).exports == 3 and not explain(ours).python_ops


@pytest.mark.parametrize("kept", [False, True], ids=["alone", "behind one that keeps"])
def test_hooks_that_are_registered_anew(kept):
    """The same graph holds, also where PyTorch runs the submodule, as long as they compute the same."""
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    seen = [], []
    if kept:
        for module, into in zip((ours, eager), seen, strict=True):
            module.second.register_forward_hook(lambda m, args, out, into=into: into.append(out.detach()))

    def scaled_by(factor):
        return lambda module, args, out: out * factor

    hooks = []
    for step, factor in enumerate((2.0, 2.0, 2.0, 3.0, 2.0)):
        hook = scaled_by(factor)
        hooks.append(weakref.ref(hook))
        handles = [module.second.register_forward_hook(hook) for module in (ours, eager)]
        torch.testing.assert_close(ours(rows(3, step)), eager(rows(3, step)))
        for handle in handles:
            handle.remove()
    report = explain(ours)
    assert report.captured and report.exports == 2 and report.breaks == (["second"] if kept else [])
    torch.testing.assert_close(*seen)
    assert not any(hook() for hook in hooks[:3]), "hooks are kept that were removed"


def test_hooks_that_ask_for_gradients_again_and_again():
    """transformers registers one more each time that checkpoints are switched on."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))
    eager[0].weight.requires_grad_(False)
    ours, grads = ORTModule(copy.deepcopy(eager)), []
    for step in range(4):
        for module in (ours, eager):
            module.zero_grad()

            def ask(module, args, out):
                out.requires_grad_(True)

            module[0].register_forward_hook(ask)
            y = module(torch.arange(step, step + 3))
            y.sum().backward()
            grads.append([y.detach(), *(p.grad for p in module[1].parameters())])
    torch.testing.assert_close(grads[::2], grads[1::2])
    assert explain(ours).captured and explain(ours).exports == 1


def test_hooks_that_scale_again_and_again():
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(3):
        for module in (ours, eager):
            module.first[0].register_forward_hook(lambda m, args, out: out * 2)
        torch.testing.assert_close(ours(rows(3, step)), eager(rows(3, step)))
    assert explain(ours).captured and explain(ours).exports == 3


def test_functions_of_one_code_that_a_hook_calls():
    torch.manual_seed(0)
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))

    def times(factor):
        return lambda x, plus=1.0: x * factor + plus

    first, second = times(2.0), times(3.0)

    def both(module, args, out):
        return first(out) + second(out)

    for module in (ours, eager):
        module.first[0].register_forward_hook(both)
    for step in range(4):
        second = times(3.0 + step // 2)
        torch.testing.assert_close(ours(rows(3, step)), eager(rows(3, step)))
    second.__defaults__ = (5.0,)
    torch.testing.assert_close(ours(rows(3)), eager(rows(3)))
    assert explain(ours).captured


def test_a_context_variable_that_is_set_outside():
    torch.manual_seed(0)
    ours = ORTModule(Net())
    ours.first[0].register_forward_hook(collect)
    ours(rows(3))
    assert explain(ours).captured and not explain(ours).python_ops
    found = {"states": []}
    token = collector.set(found)
    try:
        for step in range(3):
            ours(rows(3, step))
    finally:
        collector.reset(token)
    assert len(found["states"]) == 3
    expected = [ours.first[0].forward(rows(3, step)) for step in range(3)]
    torch.testing.assert_close(found["states"], expected)


_log = []


@pytest.mark.parametrize(
    ("transparent", "hook"),
    [
        (True, lambda m, args, out: out * 2),
        (True, lambda m, args, out: out.relu()[..., :1] + out),
        (False, lambda m, args, out: _log.append(out)),
        (False, lambda m, args, out: print(out.shape)),
        (False, lambda m, args, out: m.weight + out),
        (False, lambda m, args, out: torch.relu(out)),
        (False, lambda m, args, out: out.__class__),
        (False, lambda m, args, out, kept=[]: kept.append(out)),  # noqa: B006
        (False, lambda *args: args[0].weight.relu()),
        (False, functools.partial(collect)),
        (False, _log.append),
    ],
)
def test_which_hooks_are_transparent(transparent, hook):
    assert (hook_analysis.reach_of(hook) is not None) == transparent


def _changing(m, args, out):
    out.requires_grad_(True)
    out.mul_(2)


def _returning(m, args, out):
    return out.requires_grad_(True)


def _adding(m, args, out):
    out.requires_grad_(True)
    out += 1


def _asking(m, args, out):
    args[0].requires_grad_(False)
    out.requires_grad_()


@pytest.mark.parametrize(
    ("enough", "hook"),
    [
        (True, lambda m, args, out: None),
        (False, lambda m, args, out: out),
        (False, _changing),
        (False, _returning),
        (False, _adding),
        (False, _asking),  # an item of what it is given may be another tensor by then
    ],
)
def test_hooks_of_which_one_is_enough(enough, hook):
    assert hook_analysis.once_is_enough(hook.__code__) == enough
