"""What leaves a submodule that PyTorch runs by another way than its result keeps its gradient."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

LOSSES: list = []
KEPT: dict = {}


class Decides(nn.Module):
    """Asks a random number, so PyTorch runs it; ``puts`` is given a loss, the input and the result."""

    def __init__(self, puts):
        super().__init__()
        self.linear, self.puts = nn.Linear(3, 3), puts

    def forward(self, x, *given, **named):
        h = self.linear(x)
        y = h * (1.0 if torch.rand(()).item() < 2 else 0.5)
        self.puts(self, 10 + h.square().mean(), x, y, *given, **named)
        return y


class Model(nn.Module):
    def __init__(self, puts, call):
        super().__init__()
        self.first, self.decides, self.call = nn.Linear(3, 3), Decides(puts), call
        self.kept = []

    def forward(self, x):
        return self.call(self, self.first(x))


def with_list(self, x):
    losses = []
    return self.decides(x, losses).mean() + sum(losses)


def with_dictionary(self, x):
    losses = {}
    return self.decides(x, named=losses).mean() + losses["loss"]


def with_nested(self, x):
    out = {"losses": []}
    return self.decides(x, out).mean() + sum(out["losses"])


def with_global_list(self, x):
    LOSSES.clear()
    return self.decides(x).mean() + sum(LOSSES)


def with_global_dictionary(self, x):
    return self.decides(x).mean() + KEPT["loss"]


def with_attribute_of_its_own(self, x):
    return self.decides(x).mean() + self.decides.loss


def with_nothing(self, x):
    return self.decides(x).mean()


def put_in_list(self, loss, x, y, losses):
    losses.append(loss)


def put_by_name(self, loss, x, y, named):
    named["loss"] = loss


def put_nested(self, loss, x, y, out):
    out["losses"].append(loss)


def put_in_global_list(self, loss, x, y):
    LOSSES.append(loss)


def put_in_global_dictionary(self, loss, x, y):
    KEPT["loss"] = loss


def put_in_attribute(self, loss, x, y):
    self.loss = loss


def put_input(self, loss, x, y):
    KEPT["loss"] = x.square().sum()
    KEPT["input"] = x


def put_result(self, loss, x, y):
    KEPT["loss"] = y


WAYS = {
    "a list": (put_in_list, with_list),
    "a dictionary": (put_by_name, with_dictionary),
    "a list in a dictionary": (put_nested, with_nested),
    "a global list": (put_in_global_list, with_global_list),
    "a global dictionary": (put_in_global_dictionary, with_global_dictionary),
    "an attribute": (put_in_attribute, with_attribute_of_its_own),
    "the input, kept": (put_input, with_nothing),
    "the result, kept": (put_result, with_nothing),
}


@pytest.mark.parametrize("name", WAYS)
def test_gradients(name):
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        KEPT.clear()
        module = wrap(Model(*WAYS[name]))
        for _ in range(3):
            module.zero_grad()
            loss = module(torch.ones(2, 3))
            if name.endswith("kept"):  # a penalty that the script adds
                loss = loss + KEPT["loss"].square().sum()
            loss.backward()
        found.append((loss.detach(), *[p.grad for p in module.parameters()]))
    torch.testing.assert_close(found[1], found[0])


def test_a_submodule_from_which_nothing_escapes_is_one_node():
    module = ORTModule(Model(lambda *given: None, with_nothing))
    module(torch.ones(2, 3)).backward()
    assert explain(module).python_ops == ["decides"]


# --- what a custom function is given ----------------------------------------------------------------------------------


class Amax(torch.autograd.Function):
    """Notes the largest gradient in a buffer, as scaling of FP8 does."""

    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.buffer.copy_(torch.maximum(ctx.buffer, grad.abs().max()))
        return grad, None


class SetsGrad(torch.autograd.Function):
    """Accumulates the weight's gradient itself, in `grad` or in `main_grad`, as Megatron does."""

    @staticmethod
    def forward(ctx, x, weight, name):
        ctx.weight, ctx.name = weight, name
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        before = getattr(ctx.weight, ctx.name, None)
        found = grad.t() @ x
        setattr(ctx.weight, ctx.name, found if before is None else before + found)
        return grad @ ctx.weight, None, None


class Counts(torch.autograd.Function):
    """Changes a buffer in forward."""

    @staticmethod
    def forward(ctx, x, buffer):
        buffer.add_(x.detach().mean())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


class Function(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear, self.call = nn.Linear(3, 3), call
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3) / 9)
        self.register_buffer("buffer", torch.zeros(()))

    def forward(self, x):
        return self.call(self, self.linear(x))


def after_a_change(self, x):
    self.buffer.add_(1)
    return Amax.apply(x, self.buffer * 1)


FUNCTIONS = {
    "a buffer": lambda self, x: Amax.apply(x, self.buffer),
    "a buffer, changed before": after_a_change,
    "a buffer, changed by the function": lambda self, x: Counts.apply(x, self.buffer),
    "grad": lambda self, x: SetsGrad.apply(x, self.weight, "grad"),
    "main_grad": lambda self, x: SetsGrad.apply(x, self.weight, "main_grad"),
    "main_grad, twice": lambda self, x: SetsGrad.apply(
        SetsGrad.apply(x, self.weight, "main_grad"), self.weight, "main_grad"
    ),
    "grad, and used by the graph": lambda self, x: SetsGrad.apply(x, self.weight, "main_grad") @ self.weight,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gets_what_the_module_holds(name):
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        module = wrap(Function(FUNCTIONS[name]))
        for step in range(3):
            module(torch.full((2, 3), step + 1.0)).square().sum().backward()
        found.append(
            (module.buffer, module.linear.weight.grad, module.weight.grad, getattr(module.weight, "main_grad", None))
        )
    torch.testing.assert_close(found[1], found[0])
    report = explain(module)
    assert report.captured and report.python_ops


class GivenTensors(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear, self.call = nn.Linear(3, 3), call

    def forward(self, x, given):
        return self.call(self.linear(x), given)


GIVEN = {
    "a buffer": (lambda x, given: Amax.apply(x, given), lambda: torch.zeros(())),
    "main_grad": (
        lambda x, given: SetsGrad.apply(x, given, "main_grad"), lambda: torch.ones(3, 3, requires_grad=True)
    ),
    "grad": (lambda x, given: SetsGrad.apply(x, given, "grad"), lambda: torch.ones(3, 3, requires_grad=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_function_gets_the_callers_tensors(name):
    found = []
    for wrap in (lambda module: module, ORTModule):
        torch.manual_seed(0)
        call, make = GIVEN[name]
        module, given = wrap(GivenTensors(call)), make()
        for step in range(3):
            module(torch.full((2, 3), step + 1.0), given).square().sum().backward()
        found.append([module.linear.weight.grad, given.detach(), given.grad, getattr(given, "main_grad", None)])
    torch.testing.assert_close(found[1], found[0])
    assert explain(module).captured and explain(module).python_ops
