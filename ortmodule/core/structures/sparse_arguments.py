"""Writes a sparse tensor among the arguments, without a gradient, as two dense ones (:mod:`ortmodule.core.pytree`)."""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.core.errors import Unflattenable
from ortmodule.core.structures.tokens import SPARSE, TENSOR


def write(writer: Any, value: torch.Tensor) -> None:
    if id(value) in writer.twins:
        writer.is_twin(value)
        return
    made = getattr(value, "_ortmodule_made_of", None)  # one that was read before, as in a trace, is made of these two
    if made is not None and made[0] != value._version:
        raise Unflattenable("a sparse tensor, an argument, that it has changed")
    if made is None:
        made = 0, tuple(value.shape), value.is_coalesced(), value._indices(), value._values()
    _, sizes, coalesced, *parts = made
    writer.tokens += (SPARSE, sizes, coalesced, TENSOR, TENSOR)
    writer.tensors += parts
    for each in (*parts, value):  # in the order of reading
        writer.is_twin(each)


def made_of(indices: torch.Tensor, values: torch.Tensor, sizes: tuple[int, ...], coalesced: bool) -> torch.Tensor:
    made = torch.sparse_coo_tensor(indices, values, sizes, is_coalesced=coalesced)
    made._ortmodule_made_of = (made._version, sizes, coalesced, indices, values)  # type: ignore[attr-defined]  # ours
    return made
