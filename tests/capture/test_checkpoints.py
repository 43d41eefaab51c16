"""Checkpoints inside of a module: the engine runs them, and computes them again in backward, with the same bits."""

import copy
import functools
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ortmodule import Config, ORTModule, explain
from ortmodule.debug.verify import Verifier
from tests.selection import each

WIDTH = 32
AT_ONCE = {"capture_share": float("inf")}
X = torch.randn(48, 16, WIDTH, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, scale=1.0, pair=False):
        y = x + scale * self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))
        return (y, {"note": 1}, y.detach().mean()) if pair else y


def direct(function, *args, use_reentrant, preserve_rng_state=True, determinism_check="", early_stop=True, **named):
    """As a checkpoint, without it."""
    return function(*args, **named)


def plain(call, layer, x, reentrant):
    return call(layer, x, use_reentrant=reentrant)


def partial(call, layer, x, reentrant):
    """Tensors by name, as transformers' layers have them."""
    return call(functools.partial(layer, scale=torch.full((), 0.5)), x, use_reentrant=reentrant)


def several(call, layer, x, reentrant):
    y, note, mean = call(layer, x, 1.0, True, use_reentrant=reentrant)
    return y * note["note"] + mean


def nested(call, layer, x, reentrant):
    def both(x):
        return layer(call(layer, x, use_reentrant=reentrant))

    return call(both, x, use_reentrant=reentrant)


def other_draws(call, layer, x, reentrant):
    return call(layer, x, use_reentrant=reentrant, preserve_rng_state=False)


def without_checks(call, layer, x, reentrant):
    more = {} if reentrant else {"determinism_check": "none", "early_stop": False, "scale": 2.0}
    return call(layer, x, use_reentrant=reentrant, **more)


WAYS = (plain, partial, several, nested, other_draws, without_checks, checkpoint_sequential)


class Net(nn.Module):
    def __init__(self, way, reentrant, p=0.1, count=4, call=checkpoint):
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.Sequential(*[Layer(p) for _ in range(count)])
        self.head, self.way, self.reentrant, self.call = nn.Linear(WIDTH, 3), way, reentrant, call

    def forward(self, x):
        x = self.first(x)
        if self.way is checkpoint_sequential and self.call is checkpoint:
            x = checkpoint_sequential(self.layers, 2, x, use_reentrant=self.reentrant)
        else:
            way = plain if self.way is checkpoint_sequential else self.way
            for layer in self.layers:
                x = way(self.call, layer, x, self.reentrant)
        return self.head(x).square().mean()


def trained(make, wrap=ORTModule, x=X, steps=2, autocast=False):
    """(losses and gradients of some steps, the module)."""
    torch.manual_seed(0)
    model, losses = wrap(make()), []
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(10 + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(x))
        losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters())], model


def in_engine(model):
    report = explain(model)
    assert report.captured and not report.python_ops and not report.pytorch_calls, report
    return report.peak


def same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


SHORT = [(plain, False), (several, True), (nested, False), (checkpoint_sequential, True), (without_checks, False)]


@each("way, reentrant", [(way, reentrant) for way in WAYS for reentrant in (False, True)], SHORT)
def test_the_same_bits_in_less_memory(way, reentrant):
    found, ours = trained(lambda: Net(way, reentrant))
    expected, kept = trained(lambda: Net(way, reentrant, call=direct))
    same(found, expected)
    assert in_engine(ours).recomputed > in_engine(kept).recomputed
    assert explain(ours).peak.arena < 0.8 * explain(kept).peak.arena
    found, _ = trained(lambda: Net(way, reentrant, p=0.0))
    expected, _ = trained(lambda: Net(way, reentrant, p=0.0), lambda model: model)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_pytorch_with_dropout(reentrant, monkeypatch):
    """PyTorch computes with the engine's masks there."""
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, ours = trained(lambda: Net(plain, reentrant, count=2))
    in_engine(ours)
    found = ours._ortmodule.observers.one(Verifier)
    assert found.compared == found.gradients == 2 and not found.findings


def test_second_derivatives():
    """PyTorch computes them, with what dropout has dropped."""
    torch.manual_seed(0)
    ours = ORTModule(Net(plain, False, count=2))
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(ours(x), x, create_graph=True)
    first.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters()) and x.grad.any()
    in_engine(ours)


def test_autocast():
    found, ours = trained(lambda: Net(plain, False), autocast=True)
    expected, _ = trained(lambda: Net(plain, False, call=direct), autocast=True)
    same(found, expected)
    assert in_engine(ours).recomputed


def test_other_settings_choose():
    """Levels and budgets choose by themselves."""
    bits, ours = trained(lambda: Net(plain, False))
    for settings in ({"memory_budget": 1 << 40}, {"memory_opt_level": 1}):
        found, other = trained(lambda: Net(plain, False), functools.partial(ORTModule, config=Config(**settings)))
        same(found, bits)
        assert (in_engine(other).recomputed == 0) == ("memory_budget" in settings)


@pytest.mark.parametrize("call", [torch.no_grad, torch.inference_mode])
def test_without_gradients(call):
    torch.manual_seed(0)
    net = Net(plain, True).eval()
    ours = ORTModule(copy.deepcopy(net))
    with call():
        torch.testing.assert_close(ours(X), net(X))
    in_engine(ours)


def test_switched_on_and_off():
    torch.manual_seed(0)
    ours, graphs = ORTModule(Net(plain, False), config=Config(**AT_ONCE)), []
    for call in (checkpoint, direct, checkpoint):
        ours.call = call
        torch.manual_seed(1)
        ours(X).backward()
        graphs.append(ours._ortmodule.latest)
    in_engine(ours)
    assert explain(ours).exports == 2 and graphs[0] is graphs[2] is not graphs[1]


def test_an_argument_may_not_change_before_backward():
    """It is kept as it is, as autograd keeps it: PyTorch says the same."""

    class Direct(Net):
        def forward(self, x):
            for layer in self.layers:
                x = self.way(self.call, layer, x, self.reentrant)
            return self.head(x).square().mean()

    for wrap in (ORTModule, lambda model: model):
        torch.manual_seed(0)
        model, x = wrap(Direct(plain, False)), X.clone()
        loss = model(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- what a graph does not do twice -----------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of which a checkpoint is not pure."""

    def __init__(self, what, reentrant):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.what, self.reentrant, self.calls, self.seen = what, reentrant, 0, []
        self.register_buffer("count", torch.zeros(()))

    def inner(self, x):
        x = self.linear(x)
        if self.what == "statistics":
            return self.norm(x.flatten(0, 1)).view_as(x)
        if self.what == "a buffer":
            self.count += 1
        if self.what == "an attribute":
            self.calls = self.calls + 1
        if self.what == "a list":
            self.seen.append(1)
        if self.what == "a draw":
            x = x * random.random()
        return x.tanh()

    def forward(self, x):
        more = {}
        if self.what == "a context" and not self.reentrant:
            more["context_fn"] = lambda: (torch.autograd.profiler.record_function("a"), torch.enable_grad())
        return checkpoint(self.inner, x, use_reentrant=self.reentrant, **more)


class Blocks(nn.Module):
    def __init__(self, what, reentrant):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(what, reentrant), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(self.block(self.first(x))).square().mean()


IMPURE = ("statistics", "a buffer", "an attribute", "a list", "a draw", "a context")


@each(
    "what, reentrant, allowed",
    [(what, r, a) for what in IMPURE for r in (False, True) for a in (False, True) if (what, r) != ("a context", True)],
    [("statistics", False, False), ("a list", False, True), ("a context", False, False), ("a buffer", True, False)],
)
def test_what_is_not_pure_is_pytorchs(what, reentrant, allowed, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT", str(int(allowed)))
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for wrap in (functools.partial(ORTModule, config=Config(**AT_ONCE)), lambda model: model):
            random.seed(0)
            found, model = trained(lambda: Blocks(what, reentrant), wrap)
            results.append([*found, *model.buffers(), torch.tensor([model.block.calls, len(model.block.seen)])])
            if isinstance(model, ORTModule):
                report = explain(model)
    torch.testing.assert_close(*results)
    assert report.python_ops == ["block"] or not report.captured, report
    if what == "statistics":
        assert results[0][-2] == 4  # batches are counted in forward, and once more in backward
    texts = [str(w.message) for w in caught if "torch.utils.checkpoint" in str(w.message)]
    assert len(texts) == (0 if allowed else 1) and all("test_checkpoints.py:" in text for text in texts), texts


def keeps(call, layer, x, reentrant):
    """Something beside the result, which carries no gradient with reentrant autograd."""
    kept = []

    def function(x):
        kept.append(layer.wide(x))
        return layer.narrow(kept[0])

    return call(function, x, use_reentrant=reentrant) + kept[0].mean()


def given_none(call, layer, x, reentrant):
    return call(layer, x.detach(), use_reentrant=reentrant) + x


NONE = [(way, reentrant) for way in (keeps, given_none) for reentrant in (True, False)]


@each("way, reentrant", NONE, lambda case: case[1])
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_gradient_in_pytorch(way, reentrant):
    found, ours = trained(lambda: Net(way, reentrant, p=0.0, count=1))
    expected, _ = trained(lambda: Net(way, reentrant, p=0.0, count=1), lambda model: model)
    assert [t is None for t in found] == [t is None for t in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    torch.testing.assert_close([a for a, _ in pairs], [b for _, b in pairs])
    assert explain(ours).captured == ((way, reentrant) != (keeps, True))


# --- loops and models -------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        h = x[:, 0]
        for t in range(x.shape[1]):
            h = checkpoint(self.cell, x[:, t], h, use_reentrant=False)
        return h.square().mean()


@pytest.mark.filterwarnings("ignore")
def test_each_step_of_a_loop():
    torch.manual_seed(0)
    eager = Steps()
    ours = ORTModule(copy.deepcopy(eager), config=Config(**AT_ONCE))
    for length in (6, 9, 12):
        for model in (ours, eager):
            model(X[:, :length]).backward()
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()])
    in_engine(ours)
    assert explain(ours).exports == 1


def of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=128))
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2))
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, intermediate_size=128, attention_dropout=0.1)
    )


@pytest.mark.filterwarnings("ignore")
@each(
    "kind, reentrant", [(k, r) for k in ("bert", "gpt2", "llama") for r in (False, True)],
    [("bert", False), ("gpt2", True)],
)  # fmt: skip
def test_gradient_checkpointing_enable(kind, reentrant):
    ids = torch.arange(8 * 64).reshape(8, 64) % 60
    torch.manual_seed(0)
    ours, found = ORTModule(of_transformers(kind).train(), config=Config(**AT_ONCE)), []
    for on in (False, True):
        if on:
            ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ours.zero_grad()
        torch.manual_seed(1)
        loss = ours(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in ours.parameters())])
        plans = ours._ortmodule.latest.session.plans.values()
        found[-1].append([(p.arena_bytes, p.recomputed[0]) for p in plans if p.differentiates][-1])
    same(found[0][:-1], found[1][:-1])
    (kept, none), (less, some) = found[0][-1], found[1][-1]
    assert less < kept and some > none
    in_engine(ours)
    assert explain(ours).exports == 2
