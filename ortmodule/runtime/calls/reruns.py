"""Remembers who ran a forward that backward may compute again: then the same runs it once more.

A checkpoint around a module forgets what forward keeps, and calls the module again in backward. Where PyTorch ran the
first call, as there was no graph for it yet, and the engine the second, dropout would draw other masks, and autograd
find other tensors saved. So calls that wait for a graph are remembered where something may call them again: by the
memory of their inputs, and the states of PyTorch's generators, which a checkpoint puts back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ortmodule.core import devices
from ortmodule.core.torch_private import in_backward, saving_hooks

MOST_CALLS = 256


class Reruns:
    """The latest calls that PyTorch ran for want of a graph."""

    def __init__(self) -> None:
        #: By generators and memory; a storage that is held weakly keeps its address.
        self.calls: OrderedDict[Hashable, list[StorageWeakRef]] = OrderedDict()

    @contextmanager
    def noting(self, inputs: Sequence[torch.Tensor] | None) -> Iterator[None]:
        """PyTorch runs a call with these inputs inside. None: it does so each time."""
        if inputs is None or in_backward() or torch.is_inference_mode_enabled():
            yield
            return
        if torch.is_grad_enabled() and saving_hooks() is None:  # no checkpoint
            yield
            return
        state, held = _generators(), [StorageWeakRef(t.untyped_storage()) for t in inputs]
        yield
        self._add((state, _places(inputs)), held)
        if _generators() != state:  # no other call begins there, wherever its inputs are by then
            self._add((state, None), [])

    def _add(self, key: Hashable, held: list[StorageWeakRef]) -> None:
        self.calls[key] = held
        self.calls.move_to_end(key)
        while len(self.calls) > MOST_CALLS:
            self.calls.popitem(last=False)

    def is_rerun(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Is it a call that PyTorch ran, and that backward computes again?"""
        state = _generators()
        keys = ((state, _places(inputs)), (state, None))
        if in_backward():
            return any(key in self.calls for key in keys)
        for key in keys:  # it is a call of its own, and may run elsewhere
            self.calls.pop(key, None)
        return False


def _places(inputs: Sequence[torch.Tensor]) -> Hashable:
    return tuple((t.untyped_storage()._cdata, t.storage_offset(), t.shape) for t in inputs)


def _generators() -> Hashable:
    cpu, gpus = devices.generators()
    return tuple(state.numpy().tobytes() for state in (cpu, *gpus))
