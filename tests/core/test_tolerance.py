"""A gradient that is off by rounding is excused; one that is wrong is not, however small it is beside the others."""

import pytest
import torch

from ortmodule.core.tolerance import is_small_share, norm_of_all

WRONG = {
    "zero": torch.zeros_like,
    "of another sign": torch.neg,
    "twice as large": lambda g: 2 * g,
    "without its last element": lambda g: torch.cat([g[:-1], g.new_zeros(1)]),
    "in another order": lambda g: g.flip(0),
    "of the neighbour": lambda g: g.roll(1),
    "off by a fiftieth": lambda g: g * 1.02,
    "of another type": torch.Tensor.double,
    "of another shape": lambda g: g[None],
    "not finite": lambda g: g / 0,
}


def gradient(size=1.0):
    return size * torch.randn(32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name, size):
    found = gradient(size)
    assert not is_small_share(WRONG[name](found), found, norm_of_all([found, gradient(), None]))


@pytest.mark.parametrize("off, small, large", [(1e-6, True, True), (2e-3, True, False), (8e-3, True, False)])
def test_a_little_of_a_small_one(off, small, large):
    """``off``: of itself."""
    tiny, own = gradient(1e-3), gradient()
    everything = norm_of_all([tiny, own])
    noise = torch.randn(32, generator=torch.Generator().manual_seed(1))
    for each, expected in ((tiny, small), (own, large)):
        moved = each + off * each.norm() * noise / noise.norm()
        assert is_small_share(moved, each, everything) == expected


def test_the_norm_of_all():
    assert norm_of_all([torch.tensor([3.0]), None, torch.zeros(0), torch.tensor([[4.0]])]) == 5.0
