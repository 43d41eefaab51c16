"""`torch.autograd.Function` inside a module: a node of the graph that runs as in eager mode."""

import copy
import gc
import re
import threading
import traceback
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ortmodule import ORTModule, explain
from ortmodule.compat._custom_autograd_function import enable_custom_autograd_support
from ortmodule.debug.verify import Verifier


class Cube(torch.autograd.Function):
    """Its gradient is not that of its forward: code that differentiates the forward is found out."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 5 * x * ctx.scale, None


class Net(nn.Module):
    def __init__(self, function=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.function = function or (lambda x: Cube.apply(x, 0.5))

    def forward(self, x):
        return self.second(self.function(self.first(x)).relu())


def pair(function=None, module=None):
    torch.manual_seed(0)
    eager = module or Net(function)
    return ORTModule(copy.deepcopy(eager)), eager


def rows(n, seed=0):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def step(module, x, loss=lambda y: y.pow(2).sum()):
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    loss(y).backward()
    return [y.detach() if isinstance(y, torch.Tensor) else None, x.grad, *(p.grad for p in module.parameters())]


def same(ours, eager):
    assert [a is None for a in ours] == [a is None for a in eager]
    torch.testing.assert_close([a for a in ours if a is not None], [a for a in eager if a is not None])


def check(ours, eager, sizes=(3, 5, 2, 3), **kwargs):
    for i, n in enumerate(sizes):
        same(step(ours, rows(n, i), **kwargs), step(eager, rows(n, i), **kwargs))
    report = explain(ours)
    assert report.captured and report.python_ops, report
    return report


def test_it_is_a_node_of_one_graph():
    report = check(*pair())
    assert report.python_ops == ["Cube"] and report.exports == 1
    assert "Cube" in str(report)


def test_evaluation_and_no_grad():
    ours, eager = pair()
    for module in (ours, eager):
        module.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(ours(rows(3).detach()), eager(rows(3).detach()))
    check(ours, eager)


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, names, flag=False):
        ctx.flag = flag
        ctx.names = names
        order = x.argsort(-1)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x, y)
        return x * y, order, (x - y) if flag else (x + y)

    @staticmethod
    @once_differentiable
    def backward(ctx, a, order, b):
        x, y = ctx.saved_tensors
        assert ctx.names == {"k": [1, "v"]}
        return a * y * 2 + b, a * x, None, None


def test_several_outputs_other_arguments_and_integers():
    def function(x):
        product, order, other = Two.apply(x, x.cos(), {"k": [1, "v"]}, True)
        return product.gather(-1, order) + other

    check(*pair(function))


class NoGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.w = nn.Linear(4, 6), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return NoGrad.apply(self.first(x), self.w)


def test_no_gradient_is_none():
    ours, eager = pair(module=Weighted())
    check(ours, eager)
    assert ours.w.grad is None
    ours, eager = pair(module=Weighted())
    for module in (ours, eager):  # the first backward of all may be one that is repeated
        y = module(rows(3)).sum()
        y.backward(retain_graph=True)
        y.backward()
        module.grads = [p.grad for p in module.parameters()]
    same(ours.grads, eager.grads)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


def test_mark_dirty():
    def function(x):
        y = x * 1
        z = InPlace.apply(y)
        return z + y.detach()

    check(*pair(function))


class Undefined(torch.autograd.Function):
    seen = []

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        Undefined.seen.append((a is None, b is None))
        return (0 if a is None else a * 5) + (0 if b is None else b * 11)


def test_gradients_that_are_not_there_stay_undefined():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6)

        def forward(self, x):
            return Undefined.apply(self.first(x))

    ours, eager = pair(module=Module())
    for used in (0, 1, 0):
        Undefined.seen.clear()

        def loss(y, used=used):
            return y[used].sum()

        same(step(ours, rows(3), loss), step(eager, rows(3), loss))
        assert Undefined.seen[0] == Undefined.seen[-1] == (used == 1, used == 0) and len(Undefined.seen) == 2
    assert explain(ours).captured


def test_two_forwards_in_flight_in_both_orders():
    for order in ((0, 1), (1, 0)):
        found = []
        for module in pair():
            inputs = [rows(3, 1), rows(3, 2)]
            outputs = [module(x) for x in inputs]
            for i in order:
                outputs[i].sum().backward()
            found.append([x.grad for x in inputs] + [p.grad for p in module.parameters()])
        same(*found)


def test_retained_graph_and_second_backward():
    found = []
    for module in pair():
        x = rows(3)
        y = module(x).sum()
        y.backward(retain_graph=True)
        y.backward(retain_graph=True)
        y.backward()
        found.append([x.grad])
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()
    same(*found)


def test_double_backward_runs_in_pytorch():
    found = []
    for module in pair():
        x = rows(3)
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
        found.append([grad.detach(), x.grad])
    same(*found)


# --- how functions are called -----------------------------------------------------------------------------------------


class Late(torch.autograd.Function):
    """Its context is set up after forward, which has a default and may be given names."""

    @staticmethod
    def forward(x, scale=3.0):
        return x * scale, x.argmax(-1), None

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, index, nothing):
        return grad * ctx.scale * 7, None


class Prepares(torch.autograd.Function):
    """Has an `apply` of its own, which must not run twice."""

    @classmethod
    def apply(cls, x):
        return super().apply(x + 1)

    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 11


class Outer(torch.autograd.Function):
    """Calls another one, and the forward of a third."""

    @staticmethod
    def forward(ctx, x):
        return Cube.apply(x, 1.0) + Prepares.forward(None, x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 13


KEPT = Cube.apply

CALLS = {
    "kept": lambda x: KEPT(x, 0.5),
    "context afterwards": lambda x: Late.apply(x)[0] * Late.apply(x, 2.0)[1].unsqueeze(-1),
    "apply of its own": Prepares.apply,
    "inside of another": Outer.apply,
    "subclass": lambda x: type("Sub", (Cube,), {}).apply(x, 0.5),
    "twice": lambda x: Cube.apply(Cube.apply(x, 0.5), 0.25),
    "result unused": lambda x: (Cube.apply(x, 0.5), Prepares.apply(x))[1],
    "one operand twice": lambda x: NoGrad.apply(x, x),
}


@pytest.mark.parametrize("call", CALLS)
def test_ways_to_call(call):
    report = check(*pair(CALLS[call]))
    assert report.exports == 1


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@pytest.mark.skipif(TORCH < (2, 13), reason="apply() takes no keyword arguments there")
def test_arguments_by_name():
    check(*pair(lambda x: Cube.apply(x, scale=0.5)))


def test_without_a_gradient_around_it():
    def function(x):
        with torch.no_grad():
            inside = Cube.apply(x, 0.5)
        assert not inside.requires_grad
        return inside * x

    check(*pair(function))


def test_forward_that_is_called_by_itself_is_a_part_of_the_module():
    def function(x):
        return Prepares.forward(None, x) + Cube.apply(x, 0.5)

    report = check(*pair(function))
    assert report.python_ops == ["Cube"]


def test_a_forward_that_is_set_while_others_are_traced():
    class Patched(Cube):
        pass

    def function(x):
        Patched.forward = staticmethod(lambda ctx, x, scale: Cube.forward(ctx, x, scale) + 1)
        return Patched.apply(x, 0.5)

    eager = Net(function)
    expected = step(eager, rows(3))
    del Patched.forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether the engine or PyTorch runs it
        same(step(ORTModule(copy.deepcopy(eager)), rows(3)), expected)


def test_functions_are_as_before():
    """The metaclass answers for classes only while something is traced."""
    from torch.autograd.function import FunctionMeta

    before = set(vars(FunctionMeta))
    check(*pair())
    assert set(vars(FunctionMeta)) == before and "forward" not in before


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Custom(Exception):
    pass


class Fails(torch.autograd.Function):
    where, kind, ran = "", Custom, 0

    @staticmethod
    def forward(ctx, x):
        Fails.ran += 1
        if Fails.where == "forward":
            raise Fails.kind("in forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if Fails.where == "backward":
            raise Fails.kind("in backward")
        return grad * 2


@pytest.mark.parametrize("kind", [Custom, ValueError, RuntimeError, TypeError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_reach_the_user(where, kind):
    Fails.where, Fails.kind = "", kind
    ours, eager = pair(Fails.apply)
    check(ours, eager, sizes=(3,))
    for _ in range(2):
        Fails.where, Fails.ran = where, 0
        with pytest.raises(kind, match=f"^in {where}$") as caught:
            step(ours, rows(3))
        assert Fails.ran == 1  # it is not tried again
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == where and frames[-1].filename == __file__
        assert caught.value.__cause__ is None
        Fails.where = ""
        check(ours, eager)
    assert explain(ours).exports == 1


def test_a_failed_run_frees_what_it_had():
    kept = []

    class Keeps(torch.autograd.Function):
        fail = False

        @staticmethod
        def forward(ctx, x):
            kept.append(weakref.ref(x))
            if Keeps.fail:
                raise Custom
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    ours, _ = pair(Keeps.apply)
    step(ours, rows(3))
    Keeps.fail = True
    with pytest.raises(Custom):
        step(ours, rows(3))
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_a_thousand_steps_leave_nothing():
    alive = weakref.WeakSet()

    class Context(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            marker = type("Marker", (), {})()
            alive.add(marker)
            ctx.marker = marker
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    ours, _ = pair(Context.apply)
    x, waiting = rows(3), []
    for i in range(1000):
        waiting.append(ours(x))
        if i % 3 == 0:
            waiting.pop(0)  # never gets a backward
        elif len(waiting) > 3:
            waiting.pop(0).sum().backward()
    assert len(alive) >= len(waiting)
    waiting.clear()
    gc.collect()
    assert not alive


# --- sizes ------------------------------------------------------------------------------------------------------------


class Positive(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx, x):
        Positive.runs += 1
        mask = x > 0
        ctx.save_for_backward(mask)
        return x[mask]

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return torch.zeros(mask.shape).masked_scatter(mask, grad * 3)


def test_a_size_that_data_decides():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6)

        def forward(self, x):
            return Positive.apply(self.first(x)).sigmoid().cumsum(0)

    ours, eager = pair(module=Module())
    check(ours, eager)
    for seed in range(6):
        Positive.runs = 0
        same(step(ours, rows(5, seed)), step(eager, rows(5, seed)))
        assert Positive.runs == 2  # once in each
    assert explain(ours).exports == 1


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        assert type(count) is int
        ctx.count = x.shape[0]
        return x[: count // 2 + 1]

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad, grad.new_zeros(ctx.count - len(grad), *grad.shape[1:])]) * 2, None


def test_numbers_that_are_sizes():
    check(*pair(lambda x: Halves.apply(x, x.shape[0])))


# --- switches, surroundings -------------------------------------------------------------------------------------------


def test_switched_off(monkeypatch):
    monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0")
    ours, eager = pair()
    with pytest.warns(UserWarning, match="Cube"):
        same(step(ours, rows(3)), step(eager, rows(3)))
    assert not explain(ours).captured


def test_switched_off_by_the_originals_function():
    enable_custom_autograd_support(False)
    try:
        ours, eager = pair()
    finally:
        enable_custom_autograd_support(True)
    with pytest.warns(UserWarning, match="Cube"):
        same(step(ours, rows(3)), step(eager, rows(3)))
    ours, eager = pair()
    check(ours, eager)


def test_autocast():
    ours, eager = pair()
    for _ in range(2):
        found = []
        for module in (ours, eager):
            with torch.autocast("cpu", torch.bfloat16):
                y = module(rows(3))
            found.append(y)
        torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
    assert explain(ours).captured


def test_threads():
    ours, eager = pair()
    check(ours, eager)
    expected = [eager(rows(n)).detach() for n in (2, 3, 4, 5)]
    wrong = []

    def work(i):
        for _ in range(20):
            x = rows(i + 2)
            y = ours(x)
            torch.autograd.grad(y.sum(), x)
            if not torch.allclose(y, expected[i], atol=1e-6):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cache_and_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    eager = Weighted()
    for _ in range(2):
        ours = ORTModule(copy.deepcopy(eager))
        check(ours, eager)
        check(copy.deepcopy(ours), eager)
    assert not any(re.search("graph", p.name) for p in tmp_path.iterdir())  # its meaning is in this process only


def test_verification(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    ours, eager = pair()
    check(ours, eager)
    verifier = ours._ortmodule.observers.one(Verifier)
    assert verifier.compared and not verifier.findings
