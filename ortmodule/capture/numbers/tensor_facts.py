"""Meets questions about a tensor that values do not answer: how it lies in memory, what autograd knows.

The tensors of a trace are others than the caller's, and so are those of a submodule that PyTorch runs: what is a leaf
there is a result here. So what only the caller's own tensors tell is refused, and PyTorch runs the module. How tensors
lie in memory a graph can rest on: it serves calls whose inputs lie as those of its trace did.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule.capture.numbers import tensor_reads
from ortmodule.capture.numbers.tensor_reads import InputReads
from ortmodule.capture.scalar_guards import active, of_thread, user_line
from ortmodule.core.errors import NotTraceable, Unguardable
from ortmodule.core.names import ONLY_CALLER, PACKAGE
from ortmodule.core.objects.tensor_copies import OPERAND, attributes_of
from ortmodule.core.torch_private import DisableTorchFunction
from ortmodule.guards.descriptions import Description, describe
from ortmodule.guards.reads.tensor_attributes import MISSING

_HANDLE = torch.overrides.handle_torch_function.__code__
_LAYOUT = {torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.dim_order}
#: By the names of methods, and of functions.
_METHODS = {
    "data_ptr": "for the address of a tensor",
    "storage_offset": "where a tensor begins in its storage",
    "untyped_storage": "for the storage of a tensor",
    "storage": "for the storage of a tensor",
    "_typed_storage": "for the storage of a tensor",
    "is_set_to": "whether two tensors are one part of a storage",
    "is_shared": "whether a tensor is in shared memory",
    "is_pinned": "whether a tensor is in pinned memory",
    "is_inference": "whether a tensor was made in inference mode",
    "_is_view": "whether a tensor is a view",
}
#: Kernels that a node calls ask for these, and decide nothing by them.
_ADDRESSES = {"data_ptr", "untyped_storage"}
_ATTRIBUTES = {
    "is_leaf": "whether a tensor is a leaf",
    "grad_fn": "for the node that has made a tensor",
    "grad": "for the gradient of a tensor",
    "_base": "for the tensor that another one is a view of",
    "_version": "how often a tensor was changed",
    "_cdata": "for the address of a tensor",
    "_grad": "for the gradient of a tensor",
    "output_nr": "for the node that has made a tensor",
    "retains_grad": "whether a tensor keeps its gradient",
    "_backward_hooks": "for the hooks of a tensor",
    "_post_accumulate_grad_hooks": "for the hooks of a tensor",
}
#: These are the same of every tensor whose type has no gradients, the trace's and the caller's.
_OF_GRADIENTS = {"is_leaf", "grad_fn", "output_nr", "retains_grad"}
#: A tensor: is it contiguous, and the order of its dimensions in memory?
Layout = tuple[bool, tuple[int, ...]]


@dataclass
class InputFacts:
    """What a graph rests on, beside types and sizes of its inputs: how they lie in memory, if forward asks for it, and
    the attributes that it reads of them, by their numbers and names."""

    layouts: tuple[Layout, ...] | None
    attributes: dict[tuple[int, str], Description]

    def hold(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Is it the same of other inputs?"""
        if self.layouts is not None and self.layouts != _layouts(inputs):
            return False
        try:
            return all(_attribute(inputs[i], name) == value for (i, name), value in self.attributes.items())
        except Unguardable:
            return False


def facts(tensors: Sequence[torch.Tensor], layouts: bool, reads: InputReads) -> InputFacts | None:
    """What forward has asked of these. Raises NotTraceable for an attribute that cannot be compared."""
    attributes = {}
    for (i, name), place in reads.items():
        try:
            attributes[i, name] = _attribute(tensors[i], name)
        except Unguardable:
            text = f"{place} reads the attribute {name} of an argument, which cannot be compared from call to call"
            raise NotTraceable(f"{text}, {ONLY_CALLER}") from None
    return InputFacts(_layouts(tensors) if layouts else None, attributes) if layouts or attributes else None


def _attribute(tensor: torch.Tensor, name: str) -> Description:
    return describe((attributes_of(tensor).get(name, MISSING),))


def _layouts(tensors: Sequence[torch.Tensor]) -> tuple[Layout, ...]:
    return tuple((t.is_contiguous(), _order(t.stride())) for t in tensors)


def _order(strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda d: -strides[d]))


def _question(function: Any, args: tuple) -> str | None:
    """What a function of torch's asks of a tensor; "": how it lies in memory; None: nothing of these."""
    if function.__name__ == "__get__":
        name = getattr(function.__self__, "__name__", "")
        return None if name in _OF_GRADIENTS and not _may_have_gradient(args[0]) else _ATTRIBUTES.get(name)
    return "" if function in _LAYOUT else _METHODS.get(function.__name__)


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    with DisableTorchFunction():
        return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def asked_in_node(function: Any, args: tuple) -> None:
    """The same while PyTorch runs a node of the trace, which gets contiguous tensors in every run. What is asked of an
    input of the module counts. Raises NotTraceable."""
    recorder, what = of_thread(), _question(function, args)
    if what is None or recorder is None or not args or not isinstance(args[0], torch.Tensor):
        return
    if OPERAND in attributes_of(args[0]) and function.__name__ not in _ADDRESSES and _by_user():
        with DisableTorchFunction():
            contiguous = args[0].is_contiguous()
        if what or not contiguous:
            raise NotTraceable(f"{user_line()} asks {what or 'how a tensor lies in memory'}, {ONLY_CALLER}")
        recorder.asks_layout = True


def asked(function: Any, args: tuple) -> None:
    """A function of torch's is called while a module is traced. Raises NotTraceable."""
    what = _question(function, args)
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
    if frame.f_code is _HANDLE and frame.f_back is not None and frame.f_back.f_back is not None:
        frame = frame.f_back.f_back  # a method that torch has in Python
    while frame.f_back is not None and frame.f_code.co_filename == tensor_reads.__file__:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith((torch.__path__[0], PACKAGE))
