"""Reads the sizes and the type of a traced tensor, where a trace knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ortmodule.core.torch_private import TracedValue

if TYPE_CHECKING:
    from ortmodule.core.traced_types import JitType


def sizes_of(value: TracedValue) -> list[int]:
    """Raises TypeError where a trace does not know them."""
    sizes = value.type().sizes()
    if sizes is None:
        raise TypeError(f"the sizes of {value.debugName()} are not known in the trace")
    return sizes


def dtype_of(value: TracedValue) -> torch.dtype:
    """Raises TypeError where a trace does not know it."""
    dtype = value.type().dtype()
    if dtype is None:
        raise TypeError(f"the type of {value.debugName()} is not known in the trace")
    return dtype


def rank_of(value: TracedValue) -> int:
    """Raises TypeError where a trace does not know it."""
    return _rank_of(value.type())


def of_any_size(kind: JitType) -> JitType:
    """The type of a tensor with sizes that are not known. Raises TypeError where a trace does not know its rank."""
    return kind.with_sizes([None] * _rank_of(kind))


def _rank_of(kind: JitType) -> int:
    rank = kind.dim()
    if rank is None:
        raise TypeError(f"the rank of a {kind.annotation_str} is not known in the trace")
    return rank
