"""Lets code run that writes into tensors around a module, and leaves these as they were.

`STATISTICS["loss"] += loss` changes the tensor that is there, and autograd's graph behind it, which nothing could put
back. So a copy takes its place while the code runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ortmodule.core.tensor_copies import cloned
from ortmodule.core.tensor_memory import GIVES_MEMORY, is_in_place, is_of_data, memory_of


class OutsideWrites(TorchFunctionMode):
    """Inside, torch's functions that would write into one of ``tensors`` get a copy of it, as all others from then on.
    What is written by way of other tensors with the same memory is put back at the end. ``written`` takes those
    concerned, by their ids."""

    def __init__(self, tensors: Iterable[torch.Tensor], written: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._memory = {memory: t for t in self._tensors.values() if (memory := memory_of(t))}
        self._copies: dict[int, torch.Tensor] = {}  # by the ids of what they are of
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with what was in them, by their ids
        self._written = written

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, traceback)
        for key, (tensor, then) in self._kept.items():
            if not torch.equal(tensor, then):
                self._written[key] = tensor
                tensor.detach().copy_(then)

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._tensors and (args or kwargs):
            name = getattr(function, "__name__", "")
            if is_in_place(name) or name == "__setitem__" or is_of_data(function, "__set__"):
                self._before_write(args[:1])
            self._before_write(kwargs.get("out"))
            if name in GIVES_MEMORY and isinstance(args[0], torch.Tensor):
                self._keep(args[0])
            if self._copies:
                args, kwargs = self._with_copies(args), self._with_copies(kwargs)
        return function(*args, **kwargs)

    def _before_write(self, target: Any) -> None:
        if isinstance(target, (tuple, list)):
            for each in target:
                self._before_write(each)
        elif not isinstance(target, torch.Tensor) or id(target) in self._copies:
            return
        elif id(target) in self._tensors:
            self._written[id(target)] = target
            self._copies[id(target)] = _copied(target)
        elif (whole := self._keep(target)) is not None:
            self._written[id(whole)] = whole

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Sees to it that the one with this memory, which is returned, gets its elements back."""
        whole = self._memory.get(memory_of(tensor))
        if whole is not None and id(whole) not in self._kept:
            self._kept[id(whole)] = whole, whole.detach().clone()
        return whole

    def _with_copies(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copies.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(map(self._with_copies, value))
        if type(value) is dict:
            return {key: self._with_copies(each) for key, each in value.items()}
        return value


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf stays one, as it may be written where no gradients are."""
    if tensor.is_leaf:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return cloned(tensor)
