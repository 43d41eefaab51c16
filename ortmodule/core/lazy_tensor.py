"""Defers the values of a tensor until the script reads them.

To the caller it is a tensor. What says nothing of its values (shape, type) is answered at once, `float()` and
`detach()` are put off, too, and all else gets the plain tensor that it stands for: the same one every time, so that a
change in place is seen by all that comes after. Gradients pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortmodule.core.errors import StateError
from ortmodule.core.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map_only


class Deferred(torch.Tensor):
    """A tensor whose values come from ``source.values()`` when they are asked for."""

    @staticmethod
    def __new__(cls, source: Any, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> Deferred:
        return make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)

    def __init__(self, source: Any, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> None:
        self._source = source
        self._plain: Any = None

    def materialised(self) -> torch.Tensor:
        """The plain tensor that this one is; a touch."""
        if self._plain is None:
            with torch.inference_mode(False), torch.enable_grad(), DisableTorchFunctionSubclass():
                self._plain = _Look.apply(self)
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALWAYS or (func in _DESCRIPTIVE and isinstance(args[0], Deferred) and args[0]._plain is None):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _LATER and len(args) == 1 and not kwargs and args[0]._plain is None:
            return _LATER[func](args[0])
        args, kwargs = tree_map_only(Deferred, Deferred.materialised, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has a function there that is no method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What gets past `__torch_function__`, from C++: autograd has seen it already."""
        kwargs = kwargs or {}
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given.get(argument.name), Deferred):
                raise StateError(f"{func} cannot change logits in place that are not computed yet: clone them first")
        return func(*tree_map_only(Deferred, _memory, args), **tree_map_only(Deferred, _memory, kwargs))


def _memory(deferred: Deferred) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        return (deferred._source.values() if deferred._plain is None else deferred._plain).detach()


class _Look(torch.autograd.Function):
    """From a deferred tensor to a plain one. It shares its memory with the source, which others may have saved."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred) -> torch.Tensor:
        return deferred._source.values().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Derived:
    """What a function makes of another tensor's values."""

    def __init__(self, of: Deferred, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.of, self.function = of, function

    def values(self) -> torch.Tensor:
        return self.function(_memory(self.of))


class _Widen(torch.autograd.Function):
    """``.float()`` later."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred) -> Deferred:
        with DisableTorchFunctionSubclass():
            ctx.dtype, shape, device = deferred.dtype, deferred.shape, deferred.device
        return Deferred(_Derived(deferred, torch.Tensor.float), torch.float32, shape, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.dtype)


def _float(deferred: Deferred) -> Deferred:
    with DisableTorchFunctionSubclass():
        return deferred if deferred.dtype is torch.float32 else _Widen.apply(deferred)


def _detach(deferred: Deferred) -> Deferred:
    with DisableTorchFunctionSubclass():
        return Deferred(_Derived(deferred, torch.Tensor.detach), deferred.dtype, deferred.shape, deferred.device)


#: Of the object, not of its values.
_ALWAYS = {torch.Tensor.__hash__}
#: What can be said without the values: properties, methods, functions.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
               "is_sparse", "is_quantized", "is_meta", "itemsize", "nbytes", "output_nr")  # fmt: skip
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
            "is_contiguous", "is_floating_point", "is_complex", "is_neg", "is_conj", "is_signed", "is_inference",
            "get_device", "__len__")  # fmt: skip
_DESCRIPTIVE = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_neg, torch.is_conj, torch.is_signed),
}
#: What is put off, too.
_LATER = {torch.Tensor.float: _float, torch.Tensor.detach: _detach}
