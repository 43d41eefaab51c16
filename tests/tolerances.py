"""Says how far results may be from PyTorch's, by type.

Where |found - expected| <= relative * |expected| + share * the largest |expected|, or 1 if that is less.

So zeros never pass for something else, however small it is. The 16-bit types allow a few roundings: gradients pass
through several nodes.
"""

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

#: A sanitized build has no fused multiply-add: its sums are a little less exact.
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

#: Of one operator: (relative, share).
OPERATOR = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}
#: Of a function of PyTorch, which may be many operators; the share is of the largest element, however large.
FUNCTION = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (2e-4, 2e-5),
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (5e-3, 3e-3),
}
#: Of the elements that are not zero: how many a comparison may be unable to tell from zeros, since others are so large.
MOST_UNSEEN = 0.9


def largest(expected):
    """The largest finite magnitude, in float64; 0 if there is none."""
    finite = expected.detach()
    finite = (finite if finite.is_complex() else finite.double()).abs()
    finite = finite[finite.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


class Rounding(TorchDispatchMode):
    """What operators of PyTorch give in float64 is off by a rounding in a type of that ``epsilon``, up or down at
    random: how far such roundings move the results of a computation, however much cancels on the way."""

    def __init__(self, seed, epsilon):
        super().__init__()
        self.generator, self.by = torch.Generator().manual_seed(seed), epsilon / 2

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found if func.is_view or func.namespace != "aten" else tree_map_only(torch.Tensor, self._rounded, found)

    def _rounded(self, x):
        if x.dtype != torch.float64:
            return x
        return x * (1 + self.by * (2.0 * torch.randint(2, x.shape, generator=self.generator, dtype=x.dtype) - 1))


def bounds(expected, relative, share, most=1.0):
    """How far each element may be off, in float64. ``share`` is of the largest element, or of ``most`` if that is
    less."""
    wide = expected.detach().double().abs()
    return relative * wide + share * min(most, largest(wide))


def unseen(expected, bound):
    """The share of the elements that are not zero, and finite, for which zero would do."""
    wide = expected.detach().double().abs()
    there = wide.isfinite() & (wide > 0)
    return (wide <= bound)[there].double().mean().item() if there.any() else 0.0


def assert_near(found, expected, tolerance):
    """Each tensor of ``found`` differs from its fellow by ``tolerance`` times that one's norm at most."""
    assert 0 <= tolerance < 0.5, "half of what is expected, or nothing, would pass"
    for a, b in zip(found, expected, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert (a - b).norm() <= tolerance * b.norm() + 1e-30, f"{(a - b).norm() / b.norm():.2e}"
