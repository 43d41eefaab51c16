"""Describes kernels of flash attention to Triton: their arguments and how they are cut.

The engine asks for one by a line (csrc/ops/attention/triton_attention.c), as ``attention backward_keys bfloat16 64 64
abc``: the kernel, the type, the widths of heads and of values, and letters: a, a mask; b, a bias; d, dropout; s, rows
in which nothing is allowed give zeros; c, causal; k, it keeps what backward needs, or makes the bias's gradient; t,
the seed is in memory.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from ortmodule.triton_kernels.source import POINTERS

FIRST = "attention"
_POINTERS = ("q", "k", "v", "allowed", "bias", "y", "stats", "dy", "dq", "dk", "dv", "dbias")
_NUMBERS = (
    "heads", "groups", "queries", "keys", "q_b", "q_s", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "y_b", "y_s",
    "y_h", "dy_b", "dy_s", "dy_h", "a_b", "a_h", "a_q", "a_k", "b_b", "b_h", "b_q", "b_k", "scale", "factor",
    "key_and_least", "seed_low", "seed_high",
)  # fmt: skip


class Attention(NamedTuple):
    """A kernel, by the line that asks for it. ``flags``: the letters."""

    kernel: str
    dtype: str
    width: int
    value_width: int
    flags: str

    @staticmethod
    def of(program: str) -> Attention:
        _, kernel, dtype, width, value_width, *flags = program.split()
        return Attention(kernel, dtype, int(width), int(value_width), "".join(flags))

    def constants(self, block: int, other: int, interpreted: bool) -> dict[str, int | bool]:
        """What is fixed in the kernel."""
        has = {
            "HAS_ALLOWED": "a", "HAS_BIAS": "b", "DROPS": "d", "IS_SAFE": "s", "IS_CAUSAL": "c", "HAS_STATS": "k",
            "SEED_THERE": "t",
        }  # fmt: skip
        sizes = {"BLOCK": block, "OTHER": other, "WIDTH": self.width, "VALUE_WIDTH": self.value_width}
        rooms = {"D": _room(self.width), "W": _room(self.value_width)}
        has_or_not = {name: letter in self.flags for name, letter in has.items()}
        return sizes | rooms | has_or_not | {"WIDENS": interpreted and self.dtype == "bfloat16"}

    def arguments(self) -> dict[str, str]:
        """{name: Triton's type}, in order."""
        kinds = dict.fromkeys(_POINTERS, POINTERS[self.dtype]) | {"allowed": "*u8", "stats": "*fp32"}
        return kinds | dict.fromkeys(_NUMBERS, "i64") | {"seed_at": "*i64"}

    def cuts(self) -> list[tuple[int, int, int, int]]:
        """:meth:`cut`, and others that take no more shared memory."""
        block, other, warps, stages = self.cut()
        found = [(block, other, warps, stages), (block, other, 2 * warps, stages), (block, other, warps, 1)]
        found += [(max(16, block // 2), other, warps, stages), (block, max(16, other // 2), warps, stages)]
        return list(dict.fromkeys(found))

    def cut(self) -> tuple[int, int, int, int]:
        """Rows of a block, and of the blocks that it walks over; warps and stages."""
        widest = max(_room(self.width), _room(self.value_width))
        if self.dtype == "float32":
            return (32, 32, 4, 1) if widest <= 64 else (16, 16, 4, 1)
        if self.kernel == "forward":
            return (128, 64, 4, 2) if widest <= 64 else (64, 64, 4, 2) if widest <= 128 else (32, 32, 4, 1)
        return (64, 64, 4, 1) if widest <= 64 else (64, 32, 4, 1) if widest <= 128 else (16, 16, 4, 1)


def _room(width: int) -> int:
    """A power of two, at least what a product of blocks takes."""
    return max(16, 1 << max(0, width - 1).bit_length())


def kernels() -> ModuleType:
    """The module of the kernels, which needs Triton."""
    return importlib.import_module("ortmodule.triton_kernels.attention_kernels")
