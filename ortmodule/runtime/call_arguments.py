"""Flattens the arguments of a call: tensors, and the structure around them, remembered where these are plain values."""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.core import pytree, pytree_tokens
from ortmodule.core.errors import Cause, NotInEngine, Unflattenable

#: Structures of arguments that are remembered.
MOST_STRUCTURES = 1024
#: Types of arguments that are compared by value.
_NUMBERS = (bool, int, str, type(None))
_structures: dict[tuple, pytree.Structure] = {}


def flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], pytree.Structure]:
    """``pytree.flatten((args, kwargs))``, in one step where all are plain tensors, numbers, text or None.

    Raises NotInEngine for a value that a graph cannot take in.
    """
    tensors: list[torch.Tensor] = []
    tokens: list[Any] = []
    for value in (*args, *kwargs.values()):
        cls = type(value)
        if cls is torch.Tensor and value.layout is torch.strided and not (value.is_neg() or value.is_quantized):
            tensors.append(value)
            tokens.append(pytree_tokens.TENSOR)
        elif cls in _NUMBERS:
            tokens.append((cls, value))
        else:
            break
    else:
        key = (len(args), tuple(kwargs), tuple(tokens))
        structure = _structures.get(key) if len(tensors) == len(set(map(id, tensors))) else None
        if structure is not None:
            return tensors, structure
    count = len(tensors)
    try:
        tensors, structure = pytree.flatten((args, kwargs))
    except Unflattenable as error:
        raise NotInEngine(Cause.DATA, f"an argument holds {error}") from error
    if len(tokens) == len(args) + len(kwargs) and len(tensors) == count:
        if len(_structures) >= MOST_STRUCTURES:
            _structures.clear()
        _structures[len(args), tuple(kwargs), tuple(tokens)] = structure
    return tensors, structure
