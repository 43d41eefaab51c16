"""A weight that many products read is laid out once: the same bits, in forward and backward."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from tests.passes.session import (
    ALL_PASSES,
    BF16,
    F32,
    F64,
    NO_PASSES,
    ROOM,
    TOLERANCE,
    Function,
    difference,
    export,
    run,
)

PASS = _core.passes()["packed_weights"]


def layers(x, w, b):
    """Five layers that share a weight, as ALBERT's do; one adds to what it makes, one has a bias."""
    for i in range(5):
        y = torch.nn.functional.linear(x, w, b) if i == 2 else x @ w.t()
        x = torch.tanh(y) if i % 2 else y + x
    return x


def autocast(x, w, b):
    with torch.autocast("cpu", BF16):
        return layers(x, w, b).float()


def cells(x, w, b):
    """A cell, step by step: few rows each time."""
    h, r = torch.zeros_like(x[:, 0]), w * 0.5
    for i in range(x.shape[1]):
        h = torch.tanh(x[:, i] + h @ r + b)
    return h


CASES = [
    pytest.param(function, dtype, rows, width, id=f"{function.__name__}-{str(dtype)[6:]}-{rows}x{width}")
    for function in (layers, cells, autocast)
    for dtype in ((F32,) if function is autocast else (F32, BF16, torch.float16, F64))
    for rows, width in (((70, 33), (130, 600)) if function is not cells else ((5, 33), (33, 100)))
]


@pytest.mark.parametrize(("function", "dtype", "rows", "width"), CASES)
def test_the_same_bits(function, dtype, rows, width):
    torch.manual_seed(0)
    shape = (rows, 6, width) if function is cells else (2, rows // 2, width)
    operands = [torch.randn(shape), torch.randn(width, width) / width**0.5, torch.randn(width)]
    operands = [x.to(dtype) for x in operands]
    session = export(Function(function), operands)
    assert session.inputs == ["x0", "x1", "x2"]
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = function(*leaves)
    dy = torch.randn_like(expected)
    expected = [expected.detach(), *torch.autograd.grad(expected, leaves, dy)]

    fired, ours = run(session, operands, dy, ALL_PASSES, ROOM)
    without, plain = run(session, operands, dy, PASS)
    alone, only = run(session, operands, dy, NO_PASSES ^ PASS)
    assert "packed_weights" not in without and set(alone) <= {"packed_weights"}
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)
    tolerance = 8 * TOLERANCE[BF16 if function is autocast or dtype is torch.float16 else dtype]
    for a, b, c in zip(ours, only, expected, strict=True):
        assert difference(a, c) <= tolerance and difference(b, c) <= tolerance
    if dtype is F64:
        assert "packed_weights" not in fired
    elif not fired.get("packed_weights"):
        pytest.skip("no kernel of ours is the best for this here")
    else:
        assert fired["packed_weights"] == 2  # forward and backward


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("steps", [3, 9])
@pytest.mark.parametrize("batch", [5, 33])
def test_recurrent_layers(kind, steps, batch):
    """They lay their weight out for four steps and more."""
    torch.manual_seed(0)
    module = kind(40, 72, bidirectional=True)
    ours, x = ORTModule(copy.deepcopy(module)), torch.randn(steps, batch, 40)
    results = []
    for m in (ours, module):
        leaf = x.clone().requires_grad_()
        y = m(leaf)[0]
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in m.parameters())])
    for a, b in zip(*results, strict=True):
        assert difference(a, b) <= 4 * TOLERANCE[F32]
