"""Puts new contents into tensors of the module and the caller, and tells which share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ortmodule.capture.trace_record import Write
from ortmodule.engine.session import overwrite


def put(target: Any, write: Write | None, tensor: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    """New contents for a ``target``: an input by its number, or a slot. ``write``: how; None: in place."""
    if write is not None and write.replaces and not isinstance(target, int):
        target.set(tensor)
        return
    old = inputs[target] if isinstance(target, int) else target.get()
    if write is not None and write.data:
        old.data = tensor.detach()
    else:
        overwrite(old, tensor)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two strided tensors share memory?"""
    return _begin(a) < _end(b) and _begin(b) < _end(a)


def _begin(t: torch.Tensor) -> int:
    return t.data_ptr()


def _end(t: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr() + (last + 1) * t.element_size() if t.numel() else 0
