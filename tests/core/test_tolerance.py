"""A gradient that is off by rounding is excused; a wrong one is not, however small beside the others."""

import pytest
import torch

from ortmodule.core.tolerance import is_little, movement

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
    assert not is_little(WRONG[name](found), found, 1.0)


@pytest.mark.parametrize("off, moved, expected", [
    (1e-6, 1e-6, True), (7e-6, 1e-6, True), (9e-6, 1e-6, False), (9e-3, 1.0, True), (1.1e-2, 1.0, False),
    (1e-9, 0.0, False),
])  # fmt: skip
def test_a_little_of_itself(off, moved, expected):
    """``off``: of a gradient of norm 1, where one rounding moves all gradients by ``moved``."""
    own = gradient() / gradient().norm()
    noise = torch.randn(32, generator=torch.Generator().manual_seed(1)).double()
    found = (own.double() + off * noise / noise.norm()).float()
    if off < 1e-8:
        found, own = own.double() + off * noise / noise.norm(), own.double()
    assert is_little(found, own, moved) == expected


def test_how_far_gradients_move():
    before = [torch.tensor([3.0]), None, torch.zeros(0), torch.tensor([[4.0]]), torch.ones(2)]
    assert movement(before, [torch.zeros(1), torch.ones(1), torch.zeros(0), torch.zeros(1, 1), None]) == 5.0
