"""Makes a module for the engine and its twin for PyTorch, the same inputs, and compares results."""

import copy
import dataclasses

import torch
from torch import nn

from ortmodule import ORTModule, explain


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(module, x):
    """The result of a training step, and all gradients."""
    module.zero_grad()
    y = module(x.requires_grad_())
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def step_in_mode(module, x, training):
    """:func:`step`, or the result alone of an evaluation."""
    module.train(training)
    if training:
        return step(module, x)
    with torch.no_grad():
        return [module(x)]


class Doubled(torch.autograd.Function):
    """A custom function, which PyTorch runs inside the graph."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def made(function, buffers=(), **attributes):
    """A module whose forward is `function(self, ...)`, with a Linear(4, 4), these buffers and these attributes."""

    class Made(nn.Module):
        class_scale = 1.0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            for name, value in dict(buffers).items():
                self.register_buffer(name, value)
            vars(self).update(attributes)

        def helper(self, x):
            return x

        forward = function

    torch.manual_seed(0)
    return Made()


class Pair:
    """`made(function)` with a buffer of ones, in PyTorch (`eager`) and in the engine (`ours`)."""

    def __init__(self, function):
        self.eager = made(function, {"buffer": torch.ones(4)})
        self.ours = ORTModule(copy.deepcopy(self.eager))

    def check(self, *args, captured=True, **kwargs):
        """The same results as PyTorch; returns the report."""
        found, expected = self.ours(*args, **kwargs), self.eager(*args, **kwargs)
        torch.testing.assert_close(found, expected)
        report = explain(self.ours)
        assert report.captured == captured, report.fallback
        return report


def same(a, b, **tolerances):
    """Are two results the same: structure, types, tensors (as close as assert_close takes them) and what they need?"""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, **tolerances)
        assert (a.requires_grad, a.is_leaf) == (b.requires_grad, b.is_leaf)
    elif isinstance(a, dict):
        assert type(a) is type(b) and list(a) == list(b)
        same(list(a.values()), list(b.values()), **tolerances)
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other, **tolerances)
    elif dataclasses.is_dataclass(a) or hasattr(a, "__dict__"):
        assert type(a) is type(b)
        same(vars(a), vars(b), **tolerances)
    else:
        assert type(a) is type(b) and a == b


def both(eager, scenario, captured=True):
    """`scenario(module)` does and returns the same with both, and the gradients are the same."""
    ours, results = ORTModule(copy.deepcopy(eager)), []
    for module in (ours, eager):
        results.append((scenario(module), [p.grad for p in module.parameters()]))
    same(*results)
    report = explain(ours)
    assert report.captured == captured, report.fallback
    return ours
