"""Autograd functions that take tensors in a list or tuple: nodes of the graph, as those that take tensors alone."""

import copy

import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each


class Scale(torch.autograd.Function):
    """Takes tensors in a list."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factors):
        return x * factors[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1][0]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


#: What it is given: sizes, a tensor of the graph, a constant.
LISTED = {
    "size": lambda x: Scale.apply(x, [torch.arange(x.shape[0])[:, None]]),
    "own": lambda x: Scale.apply(x, (x.detach() * 2, "unused")),
    "filled": lambda x: Scale.apply(x, [torch.full_like(x, 3.0), x.detach()]),
    "two": lambda x: Scale.apply(Scale.apply(x, [x.detach()]), [x.detach() + 1]),
}


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


@each("name", LISTED, ("size",))
def test_listed_tensors(name):
    torch.manual_seed(0)
    eager = Model(LISTED[name])
    ours = ORTModule(copy.deepcopy(eager))
    for rows in (3, 5, 3):
        x = torch.randn(rows, 4)
        results = [module(x) for module in (ours, eager)]
        torch.testing.assert_close(*results)
        for module, result in zip((ours, eager), results, strict=True):
            module.zero_grad()
            result.square().sum().backward()
        for mine, wanted in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, wanted.grad)
    assert explain(ours).fallback is None


def test_mapped_function():
    """As `torch.vmap` maps the masks of flex attention: indices in a list, and no gradient."""
    eager = Model(lambda x: x + torch.vmap(lambda a, i: Scale.apply(a, [i]))(x.detach(), torch.arange(x.shape[0])))
    ours, x = ORTModule(copy.deepcopy(eager)), torch.randn(3, 4)
    torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).fallback is None
