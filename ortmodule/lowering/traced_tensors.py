"""Reads the sizes and the type of a traced tensor, where a trace knows them."""

from __future__ import annotations

import torch

from ortmodule.core.torch_private import TracedValue


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
