"""Gradients that are handed over while backward goes on: the same bits, in several parts (grad_buckets.py)."""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule, _core, explain
from ortmodule.engine import memory_goal
from ortmodule.runtime import grad_buckets
from tests.twins import rows

WIDTH, DEPTH = 16, 6


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A layer's gradients are enough for a segment."""
    monkeypatch.setattr(memory_goal, "SEGMENT_BYTES", 1000)


class Stack(nn.Module):
    """Layers with everything that makes backward use a gradient or a parameter longer than it takes to compute it."""

    def __init__(self, depth=DEPTH, tied=True):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(depth)])
        self.added = nn.Parameter(rows(5, WIDTH, seed=3))  # its gradient is what goes on to the layers below
        self.scale = nn.Parameter(rows(WIDTH, seed=4))  # its gradient is the first, and what it is read for the last
        self.unused = nn.Parameter(torch.ones(3))
        if tied:
            self.layers[-1].weight = self.layers[1].weight

    def forward(self, x):
        middle = None
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(torch.tanh(layer(x)) + x)
            if i == len(self.layers) // 2:
                x = x + self.added
            if i == 0:
                middle = torch.tanh(x * self.scale.detach())  # a result that the last segment reads
                x = middle + x
        return (x * self.scale).pow(2).mean(), middle


def stack(**kwargs):
    torch.manual_seed(0)
    return Stack(**kwargs)


def wrapped(model, monkeypatch, setting="auto"):
    monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", setting)
    return ORTModule(copy.deepcopy(model))


@pytest.fixture
def pair(monkeypatch):
    """(in one node, in a chain)."""
    return tuple(wrapped(stack(), monkeypatch, setting) for setting in "01")


def plans(ours):
    return list(explain_graph(ours).plans.values())


def explain_graph(ours):
    assert explain(ours).captured, explain(ours).fallback
    return ours._ortmodule.latest


def grads(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        a, b = one[name], other[name]
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def name_of(loss):
    return loss.grad_fn.name()


# --- the same gradients -----------------------------------------------------------------------------------------------


def test_same_bits(pair):
    one, chain = pair
    for step in range(3):
        x = [rows(5, WIDTH, seed=step).requires_grad_() for _ in pair]
        for model, given in zip(pair, x, strict=True):
            loss = model(given * 1.0)[0]
            loss.backward()  # accumulates
        assert name_of(loss) == "FirstNodeBackward"
        assert torch.equal(x[0].grad, x[1].grad)
        assert_same(grads(one), grads(chain))
    assert chain.added.grad is not None


def test_backward_of_some_outputs(pair):
    """One output, then the other, then both: none where PyTorch has none, and in the plan for other outputs, too."""
    eager, x = stack(), rows(5, WIDTH)
    for choice in [(0,), (1,), (0, 1), (1,), (0,), (0,)]:
        for model in (eager, *pair):
            model.zero_grad()
            outputs = model(x)
            sum(outputs[i].sum() for i in choice).backward()
        assert_same(grads(pair[0]), grads(pair[1]))
        for (name, a), b in zip(grads(eager).items(), grads(pair[1]).values(), strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                torch.testing.assert_close(a, b)


def test_running_statistics_and_zeros_for_other_outputs(monkeypatch):
    """A graph that changes buffers is planned for all outputs: gradients that do not arrive are zeros in it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            h = self.norm(self.a(x))
            return torch.tanh(self.b(h)), self.c(h)

    torch.manual_seed(0)
    eager = Net()
    models = [copy.deepcopy(eager), *(wrapped(eager, monkeypatch, setting) for setting in "01")]
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(rows(5, WIDTH, seed=step))[step % 2].sum().backward()
        assert_same(grads(models[1]), grads(models[2]))
        assert_same(dict(models[1].named_buffers()), dict(models[2].named_buffers()))
        theirs, ours = grads(models[0]), grads(models[2])
        assert {n for n in theirs if theirs[n] is None} == {n for n in ours if ours[n] is None} != set()


def test_retained_graphs(pair):
    """Twice through one graph, and part of it first."""
    x = rows(5, WIDTH)
    for model in pair:
        loss = model(x)[0]
        loss.backward(retain_graph=True)
        model.first = {n: g.clone() for n, g in grads(model).items() if g is not None}
        model.zero_grad()
        torch.autograd.grad(loss, [model.layers[4].weight], retain_graph=True)
        loss.backward()
        assert_same(model.first, {n: g for n, g in grads(model).items() if g is not None})
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same(*map(grads, pair))


def test_several_forwards_before_their_backwards(pair):
    for model in pair:
        losses = [model(rows(5, WIDTH, seed=i))[0] for i in range(3)]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
    assert_same(*map(grads, pair))


def test_gradients_of_some_parameters(monkeypatch):
    """Only the segments that lead to them run; the memory of a backward that ends early is let go."""
    ours, x, begun = wrapped(stack(tied=False), monkeypatch, "1"), rows(5, WIDTH), []

    class Spy(grad_buckets.Backward):
        def __init__(self, *args):
            super().__init__(*args)
            self.count = [0]
            begun.append((weakref.ref(self), self.count))

        def run(self, *args):
            self.count[0] += 1
            super().run(*args)

    monkeypatch.setattr(grad_buckets, "Backward", Spy)
    ours(x)[0].backward()
    loss = ours(x)[0]
    last, first = (ours.layers[i].weight for i in (DEPTH - 1, 0))
    (found,) = torch.autograd.grad(loss, [last])
    assert torch.equal(found, last.grad)
    assert begun[1][0]() is None and begun[1][1][0] < begun[0][1][0] / 3
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, [first])
    (found,) = torch.autograd.grad(ours(x)[0], [first])
    assert torch.equal(found, first.grad) and begun[-1][1] == begun[0][1]
    loss = ours(x)[0]
    ours.zero_grad()
    loss.backward(inputs=[last])
    assert {n for n, g in grads(ours).items() if g is not None} == {f"layers.{DEPTH - 1}.weight"}


def test_parameters_that_are_used_elsewhere_too(pair):
    x = rows(5, WIDTH)
    for model in pair:
        loss = model(x)[0]
        (loss + (model.layers[2].weight ** 2).sum() + model.unused.sum()).backward()
    assert_same(*map(grads, pair))
    eager = stack()
    (eager(x)[0] + (eager.layers[2].weight ** 2).sum() + eager.unused.sum()).backward()
    for a, b in zip(eager.parameters(), pair[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_second_order(monkeypatch):
    """create_graph=True: every node gives its own gradients, which can be differentiated again."""
    x, eager = rows(5, WIDTH), stack()
    ours = wrapped(eager, monkeypatch, "1")
    for model in (eager, ours):
        loss = model(x)[0]
        assert model is eager or name_of(loss) == "FirstNodeBackward"
        parameters = [p for n, p in model.named_parameters() if n != "unused"]
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(g.pow(2).sum() for g in found).backward()
        model.zero_grad_ = grads(model)
    for (name, a), b in zip(grads(eager).items(), grads(ours).values(), strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    model = ours
    loss = model(x)[0]
    loss.backward(create_graph=True)
    assert model.layers[0].weight.grad.requires_grad


# --- hooks that do something ------------------------------------------------------------------------------------------


def test_steps_of_an_optimizer_inside_of_backward(pair):
    """A hook changes its parameter and takes the gradient away: later segments must need neither."""

    def step(parameter):
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad.fill_(float("nan"))
        parameter.grad = None

    before = copy.deepcopy(dict(pair[0].named_parameters()))
    for model in pair:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for i in range(4):
            model(rows(5, WIDTH, seed=i))[0].backward()
    assert_same(*(dict(model.named_parameters()) for model in pair))
    for name, parameter in pair[1].named_parameters():
        assert parameter.isfinite().all() and torch.equal(parameter, before[name]) == (name == "unused")


def test_hooks_that_change_gradients(pair):
    for model in pair:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 0.5)
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.fill_(7.0)))
        model(rows(5, WIDTH))[0].backward()
    assert_same(*map(grads, pair))
    assert (pair[1].layers[0].weight.grad == 7).all()


def test_a_parameter_that_backward_still_needs_must_not_change(monkeypatch):
    """As in PyTorch: the error of an edit in place; the next step is right."""
    x, eager = rows(5, WIDTH), stack(tied=False)
    ours = wrapped(eager, monkeypatch, "1")

    def hook(model):
        def change(parameter):
            with torch.no_grad():
                model.layers[0].weight.add_(1.0)
                model.layers[1].weight.add_(1.0)

        return change

    for model in (eager, ours):
        handle = model.layers[DEPTH - 1].weight.register_post_accumulate_grad_hook(hook(model))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x)[0].backward()
        handle.remove()
        model.zero_grad()
        model(x)[0].backward()
    for a, b in zip(eager.parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_exceptions_of_hooks(pair, monkeypatch):
    """In the middle: what the backward held is let go at the next one, which is right."""
    one, chain = pair
    begun = []

    class Spy(grad_buckets.Backward):
        def __init__(self, *args):
            super().__init__(*args)
            begun.append(weakref.ref(self))

    monkeypatch.setattr(grad_buckets, "Backward", Spy)

    def fail(parameter):
        raise KeyError("mine")

    handle = chain.layers[3].weight.register_post_accumulate_grad_hook(fail)
    loss = chain(rows(5, WIDTH))[0]
    with pytest.raises(KeyError, match="mine"):
        loss.backward()
    assert chain.layers[4].weight.grad is not None and chain.layers[0].weight.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    handle.remove()
    for model in pair:
        model.zero_grad()
        model(rows(5, WIDTH))[0].backward()
    assert begun[0]() is None  # what autograd had queued goes with its next backward
    assert_same(*map(grads, pair))


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_errors_of_the_engine(at, retain, monkeypatch):
    """PyTorch computes the gradients that are left, with one warning, as it does for a backward in one node. Another
    backward may follow, if the graph is retained."""
    eager, x = stack(), rows(5, WIDTH)
    ours, calls = wrapped(eager, monkeypatch, "1"), []

    class Failing(grad_buckets.Backward):
        def run(self, *args):
            calls.append(1)
            if len(calls) == at + 1:
                raise _core.EngineError("no such luck")
            super().run(*args)

    ours(x)
    monkeypatch.setattr(grad_buckets, "Backward", Failing)
    losses = ours(x)[0], eager(x)[0]
    with pytest.warns(UserWarning, match="no such luck"):
        losses[0].backward(retain_graph=retain)
    assert len(calls) == at + 1
    losses[1].backward(retain_graph=retain)
    for loss in losses if retain else ():
        loss.backward()
    for (name, a), b in zip(grads(eager).items(), grads(ours).values(), strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b)


# --- surroundings -----------------------------------------------------------------------------------------------------


def test_nothing_is_left_without_a_backward(monkeypatch):
    """The chain and its outputs, some of which it reads, are no cycle."""
    ours = wrapped(stack(), monkeypatch, "1")
    ours(rows(5, WIDTH))
    outputs = ours(rows(5, WIDTH))
    assert any(part.outputs for part in plans(ours)[-1].segments[1:])
    call = weakref.ref(outputs[0].grad_fn.pending)
    assert call() is not None
    del outputs
    assert call() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, pair):
    for model in pair:
        x = rows(5, WIDTH).requires_grad_()
        checkpoint(lambda y, model=model: model(y)[0], x, use_reentrant=reentrant).backward()
        with torch.no_grad():
            assert not model(x)[0].requires_grad
        model.x = x.grad
    assert torch.equal(pair[0].x, pair[1].x)
    assert_same(*map(grads, pair))


def test_a_checkpoint_is_one_node_in_auto(monkeypatch):
    """It runs forward again and wants the same saved, whatever hooks have come or gone between."""
    ours = wrapped(stack(), monkeypatch)
    handle = ours.added.register_hook(lambda grad: None)
    x = rows(5, WIDTH).requires_grad_()
    loss = checkpoint(lambda y: ours(y)[0], x, use_reentrant=False)
    handle.remove()
    loss.backward()
    assert x.grad is not None and name_of(loss) == "BridgeBackward"


def test_anomalies_and_packed_tensors(pair):
    for model in pair:
        with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
            model(rows(5, WIDTH))[0].backward()
    assert_same(*map(grads, pair))


def test_threads(pair):
    """Backwards at one time, of several graphs and of one that is kept."""
    x = rows(5, WIDTH)
    one, chain = pair
    expected = torch.autograd.grad(one(x)[0], [one.layers[0].weight, one.added])
    shared, errors = chain(x)[0], []

    def work(i):
        try:
            for _ in range(10):
                loss = shared if i % 2 else chain(x)[0]
                found = torch.autograd.grad(loss, [chain.layers[0].weight, chain.added], retain_graph=loss is shared)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_observers_watch_one_node(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    ours = wrapped(stack(), monkeypatch, "1")
    loss = ours(rows(5, WIDTH))[0]
    assert name_of(loss) == "BridgeBackward"
    loss.backward()
    assert ours._ortmodule.observers.observers[0].gradients == 1


def test_deferred_scores(monkeypatch):
    """Scores that wait, and a gradient that arrives for them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = Stack(), nn.Linear(WIDTH, 11)

        def forward(self, x, labels):
            hidden = torch.tanh(self.body(x)[1])
            logits = self.head(hidden)
            return nn.functional.cross_entropy(logits, labels), logits

    torch.manual_seed(0)
    eager, x, labels = Net(), rows(5, WIDTH), torch.arange(5)
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "1")
    models = [eager, wrapped(eager, monkeypatch, "1")]
    for look in (False, False, True, False):
        for model in models:
            model.zero_grad()
            loss, logits = model(x, labels)
            (loss + logits.pow(2).sum() if look else loss).backward()
        for (name, a), b in zip(grads(eager).items(), grads(models[1]).values(), strict=True):
            assert (a is None) == (b is None), name
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
