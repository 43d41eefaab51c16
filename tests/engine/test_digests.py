"""Digests hold for equal bytes, and for no others."""

import pytest
import torch

from ortmodule.engine.digests import Digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_every_element_counts(dtype):
    x = torch.arange(17).to(dtype)
    digests = Digests([x])
    assert digests.hold([x.clone()])
    for i in (0, 8, 16):
        other = x.clone()
        other[i] = x[i].logical_not() if dtype is torch.bool else x[i] + 2
        assert not digests.hold([other])


def test_bytes_and_not_values():
    assert not Digests([torch.tensor([0.0])]).hold([torch.tensor([-0.0])])
    nan = torch.tensor([float("nan")])
    assert Digests([nan]).hold([nan.clone()])


def test_order_counts():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    assert not Digests([a]).hold([a.flip(0)])
    assert Digests([a, b]).hold([a.clone(), b.clone()]) and not Digests([a, b]).hold([b, a])


def test_none():
    assert Digests([]).hold([])
    assert Digests([torch.empty(0)]).hold([torch.empty(0)])
