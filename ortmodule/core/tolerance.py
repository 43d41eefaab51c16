"""Says how far results may be apart, and what of that is rounding.

Two right ways to compute something differ by roundings, which a module may magnify: a mean that cancels, a norm of
something constant. To see how much, the module runs in PyTorch once more, on inputs and parameters that are rounded
once more: a result may differ by as much as that changes it. One such run need not show all: a ReLU whose operand is
near 0 decides much at once, on either side. And it does not show what PyTorch loses itself, in a long sum. So several
runs are made (WAYS), each rounded at other places, and one in float64, and each element may differ by as much as one of
them moves it, or most others (:class:`MovedElements`): what is wrong elsewhere is found beside a decision that is open.
How far all gradients together move shows it, too: on which of them that falls is chance. So a small gradient may differ
by a little of itself that is no more than that (:func:`is_little`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable

import torch

#: How far results may be apart, relative to their largest element.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
OF_ITSELF = 1e-2  # at most so much may a small gradient be off: what is left out, or wrong, is more
ROUNDINGS = 16  # times the last bit of the largest number: how far a mean may be off
MAGNIFIED = 8  # times what one rounding of the operands does: the many inside of a module


def rounded(tensor: torch.Tensor, place: int = 0) -> torch.Tensor:
    """Floats that are rounded once more. In run 0 every other element is larger by one bit, in others each is larger
    or smaller by one."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.nextafter(tensor, torch.full_like(tensor, torch.inf))
    if not place:
        first = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) % 2 == 0
        return torch.where(first, up, tensor)
    down = torch.nextafter(tensor, torch.full_like(tensor, -torch.inf))
    chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(place)) < 0.5
    return torch.where(chosen.to(tensor.device), up, down)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Floats in float64."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


#: What becomes of the operands in one run after the other. A decision that is open falls to the other side in about
#: every third.
WAYS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    rounded, exact, *(functools.partial(rounded, place=place) for place in range(1, 8)),
)  # fmt: skip


#: Where everything is rounding, some elements move little by chance: as far as this share of them moves, all may.
MOST = 0.75


class MovedElements:
    """How far roundings of the operands have moved each element of ``expected``."""

    def __init__(self, expected: torch.Tensor) -> None:
        self.expected = expected.detach()
        self.by: torch.Tensor | None = None

    def add(self, moved: torch.Tensor) -> None:
        """What one run gives in its place."""
        moved = moved.detach()
        if moved.shape != self.expected.shape or not (moved.is_floating_point() and moved.isfinite().all()):
            return
        by = MAGNIFIED * (moved.double() - self.expected.double()).abs()
        if by.numel():
            by = by.clamp(min=by.flatten().kthvalue(math.ceil(MOST * by.numel())).values.item())
        self.by = by if self.by is None else torch.maximum(self.by, by)


def is_rounding(found: torch.Tensor, expected: torch.Tensor, moved: torch.Tensor) -> bool:
    """Does one rounding of the operands move PyTorch's own result, to ``moved``, about as far as ``found`` is off?"""
    if not (found.shape == expected.shape == moved.shape and found.dtype == expected.dtype == moved.dtype):
        return False
    if not expected.is_floating_point() or not (found.isfinite() & expected.isfinite() & moved.isfinite()).all():
        return False
    off, by = (found.double() - expected.double()).norm(), (moved.double() - expected.double()).norm()
    return bool(off <= MAGNIFIED * by)


def is_rounding_of(scale: float, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Are both the same but for roundings of numbers of this size, of which little is left: a mean that cancels?"""
    if found.shape != expected.shape or found.dtype != expected.dtype or not expected.is_floating_point():
        return False
    off = (found.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    return off <= ROUNDINGS * torch.finfo(expected.dtype).eps * scale


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
