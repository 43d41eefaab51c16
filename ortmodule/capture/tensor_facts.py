"""Meets questions about a tensor that values do not answer: how it lies in memory, what autograd knows.

The tensors of a trace are others than the caller's, and so are those of a submodule that PyTorch runs: what is a leaf
there is a result here. So what only the caller's own tensors tell is refused, and PyTorch runs the module. How tensors
lie in memory a graph can rest on: it serves calls whose inputs lie as those of its trace did.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ortmodule.capture.scalar_guards import active, user_line
from ortmodule.core.errors import NotTraceable
from ortmodule.core.names import ONLY_CALLER, PACKAGE

_LAYOUT = {torch.Tensor.is_contiguous, torch.Tensor.stride}
_METHODS = {
    torch.Tensor.data_ptr: "for the address of a tensor",
    torch.Tensor.storage_offset: "where a tensor begins in its storage",
}
_ATTRIBUTES = {
    "is_leaf": "whether a tensor is a leaf",
    "grad_fn": "for the node that has made a tensor",
    "grad": "for the gradient of a tensor",
    "_base": "for the tensor that another one is a view of",
    "_version": "how often a tensor was changed",
}
#: A tensor: is it contiguous, and the order of its dimensions in memory?
Layout = tuple[bool, tuple[int, ...]]


def layouts(tensors: Sequence[torch.Tensor]) -> tuple[Layout, ...]:
    return tuple((t.is_contiguous(), _order(t.stride())) for t in tensors)


def _order(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))


def asked(function: Any) -> None:
    """A function of torch's is called while a module is traced. Raises NotTraceable."""
    name = function.__name__
    if name == "__get__":
        what = _ATTRIBUTES.get(getattr(function.__self__, "__name__", ""))
    elif function in _LAYOUT:
        what = ""
    else:
        what = _METHODS.get(function)
    if what is None or (recorder := active()) is None or not _by_user():
        return
    if what:
        raise NotTraceable(f"{user_line()} asks {what}, {ONLY_CALLER}")
    recorder.asks_layout = True


def _by_user() -> bool:
    """Is it code of a user's, or of a library's that is not torch, that asks?"""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in ("__torch_function__", "_call"):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith((torch.__path__[0], PACKAGE))
