"""Tensors of inference mode, which have no versions, are taken wherever PyTorch takes them."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule


class Keeps(nn.Module):
    """Adds what the call before has left."""

    def __init__(self):
        super().__init__()
        self.linear, self.kept, self.items, self.table = nn.Linear(4, 4), None, [], {}
        self.register_buffer("mean", torch.zeros(4))


class InAttribute(Keeps):
    def forward(self, x):
        if self.kept is not None:
            x = x + self.kept
        y = self.linear(x)
        self.kept = y.detach().mean(0)
        return y


class InBuffer(Keeps):
    def forward(self, x):
        y = self.linear(x + self.mean)
        self.mean = y.detach().mean(0)
        return y


class BufferInPlace(Keeps):
    def forward(self, x):
        y = self.linear(x + self.mean)
        self.mean.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return y


class InList(Keeps):
    def forward(self, x):
        y = self.linear(x)
        if self.items:
            y = y + self.items[-1]
        self.items.append(y.detach().mean(0))
        return y


class InTable(Keeps):
    def forward(self, x):
        y = self.linear(x) + self.table.get("mean", 0)
        self.table["mean"] = y.detach().mean(0)
        return y


class Escapes(nn.Module):
    """PyTorch runs it between two pieces of the graph."""

    def forward(self, x):
        ESCAPED[:] = [x * 2]
        return ESCAPED[0] + 0


ESCAPED = []


class Broken(Keeps):
    def __init__(self):
        super().__init__()
        self.escapes = Escapes()

    def forward(self, x):
        y = self.linear(x)
        if self.kept is not None:
            y = y + self.kept
        y = self.escapes(y) * 2
        self.kept = y.detach().mean(0)
        return y


class Given(Keeps):
    def forward(self, x, more=None):
        y = self.linear(x)
        return y if more is None else y + more


KINDS = (InAttribute, InBuffer, BufferInPlace, InList, InTable, Broken, Given)
#: Calls in inference mode, without gradients, in training, and in training with an input of inference mode.
ORDERS = ("TIT", "ITT", "TTITT", "NITNT", "IITTI", "TIN", "GT", "TG")


def call(module, mode, x, more):
    """What a call in this mode gives: its result, or the gradient of the weight."""
    given = (x,) if more is None else (x, more)
    if mode == "I":
        with torch.inference_mode():
            return module(torch.randn(3, 4))
    if mode == "N":
        with torch.no_grad():
            return module(x)
    if mode == "G":
        with torch.inference_mode():
            x = x + 1
        given = (x, *given[1:])
    module.zero_grad()
    module(*given).square().sum().backward()
    return module.linear.weight.grad.clone()


def calls(module, order, takes_more):
    """A result, a gradient or what an error says, of each call. ``takes_more``: what the last inference call gave."""
    more, found = None, []
    for i, mode in enumerate(order):
        torch.manual_seed(i)
        try:
            found.append(call(module, mode, torch.randn(3, 4), more))
        except RuntimeError as error:
            found.append(str(error))
            break  # what an error leaves is not compared
        if takes_more and mode == "I":
            more = found[-1].mean(0)
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_calls(kind, order):
    torch.manual_seed(0)
    eager = kind()
    ours = ORTModule(copy.deepcopy(eager), DebugOptions(log_level=LogLevel.FATAL))
    sides = [calls(module, order, kind is Given) for module in (ours, eager)]
    for i, (found, expected) in enumerate(zip(*sides, strict=True)):
        if isinstance(expected, str):
            assert isinstance(found, str) and found[:30] == expected[:30], f"call {i}: {found}"
        else:
            assert isinstance(found, torch.Tensor), f"call {i}: {found}"
            torch.testing.assert_close(found, expected, msg=lambda text, i=i: f"call {i}: {text}")
            assert found.is_inference() == expected.is_inference()
