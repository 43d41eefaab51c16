"""Rules of functions of torch: what runs on this rank's parts of DTensors, and how the result lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ortmodule.core.errors import NoRule
from ortmodule.core.torch_private import loss_is_parallel
from ortmodule.host.mesh_layouts import MeshLayout, Placements, mesh_types
from ortmodule.host.opaque_regions import eagerly


class Given:
    """A DTensor among arguments: this rank's part, and how it lies."""

    def __init__(self, part: torch.Tensor, layout: MeshLayout) -> None:
        self.part, self.layout = part, layout


class PartsTrace(Protocol):
    """What rules need of a trace."""

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function of torch as a part of the trace."""

    def reduced(self, part: torch.Tensor, mesh: Any, how: str) -> torch.Tensor:
        """The "sum" or "max" of what the ranks of a mesh of one dimension have; each has gradients of its part."""

    def asks(self, setting: Callable[[], bool]) -> bool:
        """What a setting of the process is: a graph holds as long as it is the same."""


#: Of a trace and a function's arguments, with :class:`Given` in place of DTensors: what runs on parts (None: the
#: function itself), the placements of its result, and how the DTensors lie where they are used, in their order among
#: the arguments.
Rule = Callable[..., tuple[Any, Placements, list[Placements]]]


def _sizes_now(tensor: torch.Tensor) -> tuple[int, ...]:
    """In the trace, as numbers."""
    with eagerly():
        return tuple(tensor.shape)


def _is_whole(given: Any) -> bool:
    return given is None or (isinstance(given, Given) and all(p.is_replicate() for p in given.layout.placements))


def _check(condition: bool) -> None:
    if not condition:
        raise NoRule("its operands lie on the mesh in a way that PyTorch would change first")


def _linear(trace: PartsTrace, x: Any, weight: Any, bias: Any = None) -> tuple:
    _check(isinstance(x, Given) and isinstance(weight, Given) and (bias is None or isinstance(bias, Given)))
    types, mesh, last = mesh_types(), x.layout.mesh, x.part.dim() - 1
    made, of_bias, ranks = [], [], 1
    for i, (p, w) in enumerate(zip(x.layout.placements, weight.layout.placements, strict=True)):
        b = bias.layout.placements[i] if bias is not None else None
        if w.is_replicate():
            _check((p.is_replicate() or p.is_shard() and p.dim < last) and (b is None or b.is_replicate()))
            made.append(p)
        elif w.dim == 0:
            _check(p.is_replicate() and (b is None or b == types.Shard(0)))
            made.append(types.Shard(last))
        else:
            _check(p == types.Shard(last) and (b is None or b.is_replicate()))
            made.append(types.Partial())
            b = types.Partial()  # each rank adds a part of it
            ranks *= mesh.size(i)
        of_bias.append(b)
    used = [x.layout.placements, weight.layout.placements, *([tuple(of_bias)] if bias is not None else [])]

    def on_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if bias is not None and ranks > 1:  # its gradient is whole
            stopped = trace.run(torch.Tensor.detach, bias)
            same = trace.run(torch.Tensor.sub, bias, stopped)
            bias = trace.run(torch.Tensor.add, trace.run(torch.Tensor.div, stopped, ranks), same)
        return trace.run(torch.nn.functional.linear, x, weight, bias)

    return on_parts, tuple(made), used


def _embedding(
    trace: PartsTrace, ids: Any, weight: Any, padding_idx: int | None = None, max_norm: Any = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> tuple:  # fmt: skip
    _check(isinstance(ids, Given) and isinstance(weight, Given))
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NoRule("it is an embedding that counts rows, limits them or has a sparse gradient")
    made = []
    for p, w in zip(ids.layout.placements, weight.layout.placements, strict=True):
        # A table that is split by words PyTorch runs (guards/sharding/sharded.py).
        _check(p.is_replicate() or (p.is_shard() and w.is_replicate()))
        made.append(mesh_types().Shard(ids.part.dim()) if w.is_shard() else p)
    return None, tuple(made), [ids.layout.placements, weight.layout.placements]


def _norm(
    trace: PartsTrace, x: Any, sizes: Sequence[int], weight: Any = None, bias: Any = None, *rest: Any, **named: Any
) -> tuple:
    bias = bias if isinstance(bias, Given) else None
    _check(isinstance(x, Given) and _is_whole(weight) and _is_whole(bias))
    first = x.part.dim() - len(sizes)
    _check(all(p.is_replicate() or (p.is_shard() and p.dim < first) for p in x.layout.placements))
    used = [given.layout.placements for given in (x, weight, bias) if given is not None]
    return None, x.layout.placements, used


def _dropout(trace: PartsTrace, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple:
    _check(isinstance(x, Given) and not inplace)
    if training and p and not all(p.is_shard() for p in x.layout.placements):
        raise NoRule("it is a dropout of what all ranks have, whose masks would not be the same")
    return None, x.layout.placements, [x.layout.placements]


def _pointwise(trace: PartsTrace, *args: Any, **named: Any) -> tuple:
    """Operands of the same rank, or smaller ones that all ranks have; what is added up later has no rule."""
    given = [a for a in (*args, *named.values()) if isinstance(a, Given)]
    rank = max(g.part.dim() for g in given)
    _check(not any(isinstance(a, torch.Tensor) and a.dim() for a in (*args, *named.values())))
    made = []
    for each in zip(*[g.layout.placements for g in given], strict=True):
        split = {p.dim - g.part.dim() for p, g in zip(each, given, strict=True) if p.is_shard()}
        _check(len(split) <= 1 and not any(p.is_partial() for p in each))
        dim = next(iter(split), None)
        for p, g in zip(each, given, strict=True):
            # What is not split has one row there, or none.
            _check(dim is None or p.is_shard() or g.part.dim() < -dim or _sizes_now(g.part)[dim] == 1)
        made.append(mesh_types().Replicate() if dim is None else mesh_types().Shard(dim + rank))
    return None, tuple(made), [g.layout.placements for g in given]


def _mean(trace: PartsTrace, x: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> tuple:
    _check(isinstance(x, Given) and keepdim and dim is not None)
    dims = {d % x.part.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    _check(all(p.is_replicate() or (p.is_shard() and p.dim not in dims) for p in x.layout.placements))
    return None, x.layout.placements, [x.layout.placements]


def _flatten(trace: PartsTrace, x: Any, start_dim: int = 0, end_dim: int = -1) -> tuple:
    """What is split stays as it is, or is the first of the dimensions that become one."""
    _check(isinstance(x, Given) and x.part.dim() > 0)
    first, last = (dim % x.part.dim() for dim in (start_dim, end_dim))
    made = []
    for p in x.layout.placements:
        _check(not p.is_partial() and not (p.is_shard() and first < p.dim <= last))
        made.append(mesh_types().Shard(p.dim - (last - first)) if p.is_shard() and p.dim > last else p)
    return None, tuple(made), [x.layout.placements]


def _cross_entropy(
    trace: PartsTrace, x: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple:  # fmt: skip
    """Of logits that are split by classes, inside of `loss_parallel`: ranks exchange a maximum and two sums a row."""
    _check(isinstance(x, Given) and trace.asks(loss_is_parallel))
    types, mesh, dim = mesh_types(), x.layout.mesh, min(1, x.part.dim() - 1)
    _check(x.layout.placements == (types.Shard(dim),) and x.part.dtype in (torch.float32, torch.float64))
    _check(_is_whole(target) or type(target) is torch.Tensor)
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        raise NoRule("it is a cross entropy with weights, smoothed labels or settings of old")
    first = mesh.get_local_rank() * _sizes_now(x.part)[dim]

    def on_parts(x: torch.Tensor, target: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        run, tensor = trace.run, torch.Tensor
        largest = run(torch.amax, run(tensor.detach, x), dim, keepdim=True)
        shifted = run(tensor.sub, x, trace.reduced(largest, mesh, "max"))
        total = run(tensor.log, trace.reduced(run(tensor.sum, run(tensor.exp, shifted), dim), mesh, "sum"))
        stopped = run(tensor.detach, total)  # or its gradient would be a part of a sum over ranks
        counts, place = run(tensor.ne, target, ignore_index), run(tensor.sub, target, first)
        inside = run(tensor.lt, place, run(tensor.size, x, dim))
        mine = run(torch.logical_and, run(torch.logical_and, run(tensor.ge, place, 0), inside), counts)
        index = run(tensor.unsqueeze, run(torch.where, mine, place, 0), dim)
        found = run(tensor.sub, run(tensor.squeeze, run(tensor.gather, shifted, dim, index), dim), stopped)
        found = trace.reduced(run(torch.where, mine, found, 0.0), mesh, "sum")
        each = run(torch.where, counts, run(tensor.sub, run(tensor.sub, total, stopped), found), 0.0)
        if reduction == "none":
            return each
        summed = run(tensor.sum, each)
        return run(tensor.div, summed, run(tensor.sum, counts)) if reduction == "mean" else summed

    used = [x.layout.placements, *([target.layout.placements] if isinstance(target, Given) else [])]
    return on_parts, (types.Replicate(),), used


RULES: dict[str, Rule] = {
    "flatten": _flatten, "cross_entropy": _cross_entropy,
    "linear": _linear, "embedding": _embedding, "layer_norm": _norm, "rms_norm": _norm, "dropout": _dropout,
    "mean": _mean,
    **dict.fromkeys(
        (
            "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__", "div",
            "__truediv__", "__rtruediv__", "neg", "__neg__", "pow", "__pow__", "sqrt", "rsqrt", "exp", "tanh",
            "sigmoid", "relu", "gelu", "silu", "float", "bfloat16", "half", "to", "type_as", "contiguous", "square",
        ),
        _pointwise,
    ),
}  # fmt: skip
