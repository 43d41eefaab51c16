"""Replaces calls of torch that the tracer cannot record, or that must not be made on slices of a batch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from ortmodule.capture import scalar_guards
from ortmodule.capture.numbers.symbolic_numbers import stands_for_one
from ortmodule.core.errors import NotTraceable
from ortmodule.core.size_expr import is_whole
from ortmodule.core.torch_private import get_tracing_state, native_batch_norms, pad_sequence, vf_split

#: Functions that take a number to fill with, and its place. A bool there has no place in a TorchScript graph.
_FILLS = {
    torch.full: (1, "fill_value"), torch.full_like: (1, "fill_value"), torch.fill: (1, "value"),
    torch.masked_fill: (2, "value"), torch.eq: (1, "other"), torch.ne: (1, "other"),
    torch.Tensor.fill_: (1, "value"), torch.Tensor.new_full: (2, "fill_value"), torch.Tensor.masked_fill: (2, "value"),
    torch.Tensor.masked_fill_: (2, "value"), torch.Tensor.eq: (1, "other"), torch.Tensor.ne: (1, "other"),
    torch.Tensor.__eq__: (1, "other"), torch.Tensor.__ne__: (1, "other"),
    torch.scatter: (3, "value"), torch.Tensor.scatter: (3, "value"), torch.Tensor.scatter_: (3, "value"),
    torch.index_fill: (3, "value"), torch.Tensor.index_fill: (3, "value"), torch.Tensor.index_fill_: (3, "value"),
}  # fmt: skip
_SPLITS = (torch.split, torch.Tensor.split)
_CHOICES = (torch.where, torch.Tensor.where)
#: Arithmetic with a Python bool, which counts as a tensor of rank 0 does.
_SUMS = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, "add sub mul"),
        (torch.Tensor, "add sub mul __add__ __radd__ __sub__ __mul__ __rmul__ __iadd__ __imul__"),
    )
    for name in names.split()
)  # fmt: skip
_ROLLS = (torch.roll, torch.Tensor.roll)
_STRIDED = (torch.as_strided, torch.Tensor.as_strided)

#: They trust the indices or sizes that they are given, which need not fit a part of a tensor: PyTorch writes where it
#: must not.
_UNCHECKED = frozenset({
    torch.lu_unpack, torch.lu_solve, torch.linalg.lu_solve, torch.linalg.ldl_solve, torch.ormqr,
    torch.native_batch_norm, torch.ops.aten.native_batch_norm, *native_batch_norms,
})  # fmt: skip


def _instance_norm(
    x: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    """With changes of the running statistics that a trace shows."""
    if running_mean is None or not use_input_stats:
        return F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    with torch.no_grad():
        of_each = torch.var_mean(x.detach(), list(range(2, x.dim())), correction=1)
        for running, found in zip((running_var, running_mean), of_each, strict=True):
            running.mul_(1 - momentum).add_(found.mean(0).to(running.dtype), alpha=momentum)
    return F.instance_norm(x, None, None, weight, bias, True, momentum, eps)


def _pad_sequence(
    sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> torch.Tensor:
    """With the lengths as sizes of the trace: torch computes the longest where no trace sees it."""
    longest, padded = torch.stack([each.size(0) for each in sequences]).max(), []
    for each in sequences:
        missing = longest - each.size(0)
        around = (0, missing) if padding_side == "right" else (missing, 0)
        padded.append(F.pad(each, (*[0] * (2 * each.dim() - 2), *around), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def _tensor_split(input: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    """Where numbers in a list say where parts begin, which may be sizes: slices of the tensor."""
    places, dim = (*given, *named.values(), named.get("dim", 0))[:2]
    if not isinstance(places, (list, tuple)) or not isinstance(dim, int) or not -input.dim() <= dim < input.dim():
        return torch.tensor_split(input, *given, **named)
    before = (slice(None),) * (dim % input.dim())
    indices = [(*before, slice(start, end)) for start, end in itertools.pairwise((0, *places, None))]
    return tuple(_part(input, index) for index in indices)


def _part(input: torch.Tensor, index: tuple[slice, ...]) -> torch.Tensor:
    with scalar_guards.slicing(torch.Tensor.__getitem__, (input, index)):
        return input[index]


def _binary_cross_entropy(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """On the CPU PyTorch refuses what is no probability: that is a read, which each run compares."""
    if input.device.type == "cpu" and input.is_floating_point():
        x = input.detach()
        inside = ((x >= 0) & (x <= 1)).all()
        scalar_guards.read(inside)
        if not scalar_guards.untraced_item(inside):
            raise NotTraceable("binary_cross_entropy is given numbers that are no probabilities")
    return F.binary_cross_entropy(input, *args, **kwargs)


def _in_memory_order(fill: Any) -> Any:
    """A fill that PyTorch draws, one number after the other as they lie in memory: a graph has none but the order of
    the elements."""

    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_contiguous():
            return fill(input, *args, **kwargs)
        fill(_as_in_memory(input), *args, **kwargs)
        return input

    return call


def _as_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda d: -strides[d]))


#: What is called instead.
_INSTEAD = {
    F.instance_norm: _instance_norm, pad_sequence: _pad_sequence, F.binary_cross_entropy: _binary_cross_entropy,
    torch.tensor_split: _tensor_split, torch.Tensor.tensor_split: _tensor_split,
} | {
    fill: _in_memory_order(fill)
    for fill in (torch.Tensor.cauchy_, torch.Tensor.log_normal_, torch.Tensor.geometric_, torch.Tensor.random_)
}  # fmt: skip


#: The place of the argument that asks for a sparse gradient of their table.
_SPARSE = {F.embedding: 6, F.embedding_bag: 7, torch.embedding: 4, torch.embedding_bag: 5}


def has_sparse_gradient(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Does a call ask for the gradient of a table as a sparse tensor?"""
    return function in _SPARSE and True in (*args[_SPARSE[function] :][:1], kwargs.get("sparse"))


def recordable(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """What to call for ``function``, and its arguments. Raises NotTraceable where a trace cannot call it."""
    if function in _SPLITS and (by_size := _split_by_size(*args, **kwargs)) is not None:
        return vf_split, by_size, {}
    return _INSTEAD.get(function, function), *_arguments(function, args, kwargs)


def _split_by_size(tensor: Any, *given: Any, **named: Any) -> tuple[Any, ...] | None:
    """The operands of a split, where the length of its parts is a traced size; None: it is none."""
    dim = named.pop("dim", 0)
    length, dim = (*given, *named.values(), dim)[:2]
    if get_tracing_state() is None or not isinstance(length, torch.Tensor) or not is_whole(length):
        return None
    return tensor, length, dim


def _arguments(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if function in _UNCHECKED:
        raise NotTraceable(f"{function.__name__} does not check its operands")
    place = _FILLS.get(function)
    if place is not None:
        return _as_number(function, args, kwargs, *place)
    if function in _ROLLS:
        return _as_list(args, kwargs, 1, "shifts")
    if function in _STRIDED:
        return _strided(*args, **kwargs), {}
    if function in _CHOICES or function in _SUMS:
        args = tuple(torch.tensor(a) if isinstance(a, bool) else a for a in args)
        kwargs = {k: torch.tensor(v) if isinstance(v, bool) else v for k, v in kwargs.items()}
    return args, kwargs


def _as_number(function: Any, args: tuple, kwargs: dict, i: int, name: str) -> tuple[tuple, dict[str, Any]]:
    value = args[i] if i < len(args) else kwargs.get(name)
    if not isinstance(value, bool):
        return args, kwargs
    if function is torch.full and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.bool}
    if i < len(args):
        return (*args[:i], int(value), *args[i + 1 :]), kwargs
    return args, {**kwargs, name: int(value)}


def _as_list(args: tuple, kwargs: dict[str, Any], i: int, name: str) -> tuple[tuple, dict[str, Any]]:
    """With a list of one number for a number that sizes or data decide, which torch traces in a list alone."""
    value = args[i] if i < len(args) else kwargs.get(name)
    if not isinstance(value, torch.Tensor) or not (is_whole(value) or stands_for_one(value)):
        return args, kwargs
    if i < len(args):
        return (*args[:i], [value], *args[i + 1 :]), kwargs
    return args, {**kwargs, name: [value]}


def _strided(
    input: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> tuple[torch.Tensor, Any, Any, int | None]:
    """To a graph, strides are over the elements of ``input`` in its order, to PyTorch over those in memory."""
    inner = _as_in_memory(input)
    if not inner.is_contiguous() or (storage_offset is not None and input.storage_offset()):
        raise NotTraceable("as_strided is called on a view of a part of a tensor")
    return inner if not input.is_contiguous() else input, size, stride, storage_offset
