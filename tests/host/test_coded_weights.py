"""Layers with frozen weights of their own class (4 bits): PyTorch runs them, the engine the rest."""

import warnings

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 8


class Nibbles(nn.Parameter):
    """Two numbers in each byte, and how large a step is."""

    def __new__(cls, weight):
        step = weight.abs().max() / 7
        levels = (weight / step).round().clamp(-8, 7).to(torch.int64) + 8
        packed = (levels[:, ::2] + 16 * levels[:, 1::2]).to(torch.uint8)
        made = torch.Tensor._make_subclass(cls, packed, False)
        made.step = step
        return made

    def unpacked(self):
        levels = torch.stack([self.data % 16, self.data // 16], -1).flatten(1).float() - 8
        return levels * self.step


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.unpacked().t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.unpacked(), None


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = Nibbles(torch.randn(SIZE, SIZE)), nn.Parameter(torch.randn(SIZE))

    def forward(self, x):
        return Product.apply(x, self.weight) + self.bias


class Adapted(nn.Module):
    """The base layer beside a product of two small ones."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = Coded(), nn.Linear(SIZE, 2, bias=False), nn.Linear(2, SIZE, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def made():
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.LayerNorm(SIZE))


def train(model, steps=3):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
    for rows in range(2, 2 + steps):  # of other sizes each time
        loss = model(torch.randn(rows, SIZE)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def test_the_layer_is_an_island():
    ours, theirs = ORTModule(made()), made()
    torch.testing.assert_close(train(ours), train(theirs))
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    report = explain(ours)
    assert report.captured and report.python_ops == ["0.base", "2.base"], str(report)
    assert (report.engine_calls, report.pytorch_calls, report.exports) == (3, 0, 1)


def test_of_many_a_few_are_told():
    """And how many more there are."""
    torch.manual_seed(0)
    model = ORTModule(nn.Sequential(*[Coded() for _ in range(10)]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(2, SIZE))
    told = [str(w.message) for w in caught if "inside the graph" in str(w.message)]
    assert len(told) == 9 and "the submodule 0 inside" in told[0] and "2 more submodules" in told[-1], told


def test_another_weight_in_its_place():
    ours, theirs = ORTModule(made()), made()
    train(ours, 1), train(theirs, 1)
    for model in (ours, theirs):
        torch.manual_seed(2)
        model[0].base.weight = Nibbles(torch.randn(SIZE, SIZE))
    torch.testing.assert_close(train(ours, 2), train(theirs, 2))
    assert explain(ours).captured


def test_a_weight_that_becomes_one():
    """The layer was the engine's until then."""
    found = []
    for wrap in (ORTModule, lambda model: model):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), Adapted()))
        train(model, 1)
        model[0] = Coded()
        found.append((train(model, 2), model))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert explain(found[0][1]).python_ops == ["0", "2.base"]


def test_of_the_module_itself():
    """There is nothing around it."""
    ours = ORTModule(Coded())
    x = torch.randn(2, SIZE)
    torch.testing.assert_close(ours(x), ours._ortmodule.module(x))
    report = explain(ours)
    assert not report.captured and "weight is a Nibbles" in report.fallback
