"""Takes apart the arguments of a call, in one step where all are plain tensors, numbers, text or None."""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.core import pytree
from ortmodule.core.errors import Cause, NotInEngine, Unflattenable
from ortmodule.core.structures.tokens import TENSOR
from ortmodule.core.torch_private import deterministic, warns_only

MOST_STRUCTURES = 1024  # that are remembered
#: The types of arguments that are compared by value.
_CONSTANTS = (bool, int, str, type(None))
_structures: dict[tuple, pytree.Structure] = {}
#: Asked at each call.
_grad, _inference, _default = torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.get_default_dtype
_autocast, _autocast_type = torch.is_autocast_enabled, torch.get_autocast_dtype


def flattened(args: tuple, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], pytree.Structure]:
    """``pytree.flatten((args, kwargs))``, in one step where all are plain.

    Raises NotInEngine for a value that a graph cannot take in.
    """
    tensors: list[torch.Tensor] = []
    tokens: list[Any] = []
    for value in (*args, *kwargs.values()):
        cls = type(value)
        if cls is torch.Tensor and value.layout is torch.strided and not (value.is_neg() or value.is_quantized):
            tensors.append(value)
            tokens.append(TENSOR)
        elif cls in _CONSTANTS:
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


def modes() -> tuple:
    """PyTorch's modes that a graph is for: gradients, inference, autocast, the default type, determinism."""
    return (
        _grad(),
        _inference(),
        _autocast("cpu") and _autocast_type("cpu"),
        _autocast("cuda") and _autocast_type("cuda"),
        _default(),
        deterministic() and 2 - warns_only(),  # torch's debug mode
    )


def kind_of(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, list[torch.Tensor], list[float | int]] | None:
    """What of plain arguments a graph is for, the values of numbers and the sizes of tensors aside; the tensors; the
    numbers. None: they are not plain, or a tensor is empty, or there twice."""
    kind: list[Any] = [len(args), *kwargs]
    tensors: list[torch.Tensor] = []
    numbers: list[float | int] = []
    for value in (*args, *kwargs.values()):
        cls = type(value)
        if cls is torch.Tensor:
            shape = value.shape
            if value.layout is not torch.strided or value.is_neg() or value.is_quantized or 0 in shape:
                return None
            tensors.append(value)
            kind += (value.dtype, len(shape), value.requires_grad, value.device)
        elif cls is float or cls is int:
            kind.append(cls)
            numbers.append(value)
        elif cls in _CONSTANTS:
            kind += (cls, value)
        else:
            return None
    if len(tensors) > 1 and len(tensors) != len(set(map(id, tensors))):
        return None
    return (*kind, *modes()), tensors, numbers
