"""Passes that draw dropout with what is before it: the elements that are dropped, and gradients of the same bits."""

import math

import pytest
import torch
from torch import nn

from ortmodule import _core
from ortmodule.engine.session import DTYPES
from tests.passes.session import ALL_PASSES, BF16, F32, F64, TOLERANCE, Function, difference, export, run


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 48, 48), (5, 70), (1, 129), (131, 1), (3, 0), (1, 9000)], ids=str)
def test_dropout_within_a_softmax(shape, masked, dtype):
    """The elements that the two operators drop one after the other, with results and gradients of the same bits."""
    torch.manual_seed(0)
    x, allowed = torch.randn(shape, dtype=dtype), torch.rand(shape) < 0.7
    allowed[1:2] = False  # nothing is left of it

    def weights(x):
        if not masked:
            return x.softmax(-1)
        x = x.clamp(-50, 50)  # finite, as products are
        return torch.where(allowed, torch.where(allowed, x, -math.inf).softmax(-1), 0.0)

    session = export(Function(lambda x: nn.functional.dropout(weights(x), 0.3, True)), [x])
    dy, bit = torch.randn_like(x), _core.passes()["softmax_dropout"]
    fired, ours = run(session, [x], dy, ALL_PASSES)
    assert fired["softmax_dropout"] == 1
    without, apart = run(session, [x], dy, bit)
    assert "softmax_dropout" not in without
    assert all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True))
    leaf = x.clone().requires_grad_()
    p = weights(leaf).nan_to_num()
    kept = (ours[0] != 0) | (p == 0)
    assert x.numel() < 1000 or 0.65 < kept.double().mean() < (1 if masked else 0.75)
    expected = p * kept / 0.7
    expected.backward(dy)
    for a, b in zip(ours, (expected.detach(), leaf.grad), strict=True):
        assert x.numel() == 0 or difference(a, b.nan_to_num()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=DTYPES.get)
@pytest.mark.parametrize("ratio", [0.1, 0.6])
def test_dropout_behind_a_relu(ratio, dtype):
    """Gradients of the same bits, zeros and the smallest numbers among what comes in, and less that is kept."""
    torch.manual_seed(0)
    x, dy = (torch.randn(37, 65, dtype=dtype) for _ in range(2))
    smallest = torch.finfo(dtype).smallest_normal
    x.view(-1)[:5] = torch.tensor([-math.inf, 0.0, -0.0, smallest, -smallest], dtype=dtype)
    w = torch.randn(65, 65, dtype=dtype)

    def layer(x, w):
        return nn.functional.dropout(torch.relu(x), ratio, True) @ w

    session = export(Function(layer), [x, w])
    bit = _core.passes()["relu_dropout"]
    fired, ours = run(session, [x, w], dy, ALL_PASSES)
    without, apart = run(session, [x, w], dy, bit)
    assert fired["relu_dropout"] == 1 and "relu_dropout" not in without
    assert all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True))
    slope = ours[1] != 0
    assert not slope[x <= 0].any() and slope.any()
    assert abs(slope[x > 0].double().mean() - (1 - ratio)) < 0.05
    leaves = [t.double().requires_grad_() for t in (x, w)]  # in PyTorch, with the elements that were kept
    expected = (torch.relu(leaves[0]) * slope / (1 - ratio)) @ leaves[1]
    for a, b in zip(ours, [expected.detach(), *torch.autograd.grad(expected, leaves, dy.double())], strict=True):
        assert difference(a, b) <= TOLERANCE[dtype]
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in (x, w))
    peaks = [session.model.plan(specs, (True,) * 2, (True,), disabled).arena_bytes for disabled in (ALL_PASSES, bit)]
    assert peaks[0] < peaks[1]
