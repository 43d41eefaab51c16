"""Says how far results may be apart, and what of that is rounding.

Two right ways to compute something differ by roundings, which a module may magnify: a mean that cancels, a norm of
something constant. To see how much, the module runs in PyTorch once more, on inputs and parameters that are rounded
once more: a result may differ by as much as that changes it. One such run need not show all: a ReLU whose operand is
near 0 decides much at once, on either side. How far all gradients together move shows it: on which of them that falls
is chance. So a small gradient may differ by a little of itself that is no more than that (:func:`is_little`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

#: How far results may be apart, relative to their largest element.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
OF_ITSELF = 1e-2  # at most so much may a small gradient be off: what is left out, or wrong, is more
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


def movement(before: Iterable[torch.Tensor | None], after: Iterable[torch.Tensor | None]) -> float:
    """How far all these gradients together are from each other."""
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None and a.numel()]
    return math.hypot(*((a.detach().double() - b.detach().double()).norm().item() for a, b in pairs))


def is_little(found: torch.Tensor, expected: torch.Tensor, moved: float) -> bool:
    """Is what a gradient is off little of itself, and no more than some roundings move all gradients together?
    ``moved``: how far one does (:func:`movement`). One that is absent, of another sign or scaled never is."""
    if found.shape != expected.shape or found.dtype != expected.dtype or not expected.is_floating_point():
        return False
    off, own = (found.detach().double() - expected.double()).norm().item(), expected.double().norm().item()
    return off <= MAGNIFIED * moved and off <= OF_ITSELF * own
