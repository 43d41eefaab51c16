"""Tells kinds of calls apart by plain arguments: tensors, numbers, text or None."""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.core.torch_private import deterministic, warns_only

#: The types of arguments that are compared by value.
CONSTANTS = (bool, int, str, type(None))


def modes() -> tuple:
    """Modes that a graph is for, as in `Call.key`: gradients, inference, autocast, the default type, determinism."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
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
        elif cls in CONSTANTS:
            kind += (cls, value)
        else:
            return None
    if len(tensors) > 1 and len(tensors) != len(set(map(id, tensors))):
        return None
    return (*kind, *modes()), tensors, numbers
