"""Reads the attributes that users have put on a module's tensor, whichever tensor is in its place by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ortmodule.core.objects.tensor_copies import attributes_of

MISSING = object()


class TensorAttributes:
    """``getattr(owner, "scale")``: what the tensor that ``find()`` gives has under this name, or MISSING."""

    def __init__(self, name: str, find: Callable[[], Any]) -> None:
        self._find, self.__name__ = find, name

    def __getattr__(self, name: str) -> Any:
        tensor = self._find()
        return attributes_of(tensor).get(name, MISSING) if isinstance(tensor, torch.Tensor) else MISSING
