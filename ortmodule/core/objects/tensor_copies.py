"""Carries what users have put on a tensor (`x.scale = 2.0`) over to a copy of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

#: Of a copy of a tensor with attributes, or of the caller's, that is given to what PyTorch runs while a trace is made:
#: a weak reference to that tensor.
OPERAND = "_ortmodule_operand"


def with_attributes(copy: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``copy``, with the attributes of ``tensor``."""
    if (held := attributes_of(tensor)) and copy is not tensor:
        attributes_of(copy).update(held)
    return copy


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is no leaf of autograd's where there are gradients, and needs one if ``tensor`` does."""
    copy = with_attributes(tensor.clone(), tensor)
    return copy.requires_grad_() if tensor.requires_grad and not torch.is_grad_enabled() else copy


def as_operand(copy: torch.Tensor, tensor: torch.Tensor, given: bool) -> torch.Tensor:
    """``copy``, which says of itself that it has not what ``tensor`` has. ``given``: is that an input?"""
    if given or attributes_of(tensor):
        attributes_of(copy)[OPERAND] = weakref.ref(tensor)
    return copy


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Those that were set, by their names; a change of it is one of the tensor."""
    return object.__getattribute__(tensor, "__dict__")
