"""Says how far results may be apart, and what of that is rounding.

Two right ways to compute something differ by roundings, which a module may magnify: a mean that cancels, a norm of
something constant. To see how much, the module runs in PyTorch once more, on inputs and parameters that are rounded
once more: a result may differ by as much as that changes it. One such run need not show all: a ReLU whose operand is
near 0 decides much at once, on either side. So a small gradient may differ by a little of itself, which is next to
nothing beside all gradients (:func:`is_small_share`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

#: How far results may be apart, relative to their largest element.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: What a small gradient is off may be this share of all gradients, times the tolerance, and at most so much of itself.
OF_ALL, OF_ITSELF = 0.2, 1e-2
MAGNIFIED = 8  # times what one rounding of the operands does: the many inside of a module


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Floats that are rounded once more: every other element is larger by one bit."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.nextafter(tensor, torch.full_like(tensor, torch.inf))
    return torch.where(torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 2 == 0, up, tensor)


def is_rounding(found: torch.Tensor, expected: torch.Tensor, moved: torch.Tensor) -> bool:
    """Does one rounding of the operands move PyTorch's own result, to ``moved``, about as far as ``found`` is off?"""
    if not (found.shape == expected.shape == moved.shape and found.dtype == expected.dtype == moved.dtype):
        return False
    if not expected.is_floating_point() or not (found.isfinite() & expected.isfinite() & moved.isfinite()).all():
        return False
    off, by = (found.double() - expected.double()).norm(), (moved.double() - expected.double()).norm()
    return bool(off <= MAGNIFIED * by)


def norm_of_all(gradients: Iterable[torch.Tensor | None]) -> float:
    """The norm of all these together."""
    return math.hypot(*(g.detach().double().norm().item() for g in gradients if g is not None and g.numel()))


def is_small_share(found: torch.Tensor, expected: torch.Tensor, everything: float) -> bool:
    """Is what a gradient is off next to nothing beside all gradients, whose norm is ``everything``, and little of
    itself? One that is absent, of another sign or scaled never is."""
    tolerance = TOLERANCE.get(expected.dtype)
    if tolerance is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    off, own = (found.detach().double() - expected.double()).norm().item(), expected.double().norm().item()
    return off <= tolerance * (own + OF_ALL * everything) and off <= OF_ITSELF * own
