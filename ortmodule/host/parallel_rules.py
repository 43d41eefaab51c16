"""Rules of functions of torch: what runs on this rank's parts of DTensors, and how the result lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortmodule.host.mesh_layouts import MeshLayout, Placements, mesh_types
from ortmodule.host.opaque_regions import eagerly


class Refused(Exception):
    """There is no rule for what is done with a DTensor; the sentence says why."""


class Given:
    """A DTensor among arguments: this rank's part, and how it lies."""

    def __init__(self, part: torch.Tensor, layout: MeshLayout) -> None:
        self.part, self.layout = part, layout


#: Of a function's arguments, with :class:`Given` in place of DTensors: what runs on parts (None: the function itself),
#: the placements of its result, and how the DTensors lie where they are used, in their order among the arguments.
Rule = Callable[..., tuple[Any, Placements, list[Placements]]]


def _sizes_now(tensor: torch.Tensor) -> tuple[int, ...]:
    """In the trace, as numbers."""
    with eagerly():
        return tuple(tensor.shape)


def _is_whole(given: Any) -> bool:
    return given is None or (isinstance(given, Given) and all(p.is_replicate() for p in given.layout.placements))


def _check(condition: bool) -> None:
    if not condition:
        raise Refused("its operands lie on the mesh in a way that PyTorch would change first")


def _linear(run: Callable, x: Any, weight: Any, bias: Any = None) -> tuple:
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
            stopped = run(torch.Tensor.detach, bias)
            same = run(torch.Tensor.sub, bias, stopped)
            bias = run(torch.Tensor.add, run(torch.Tensor.div, stopped, ranks), same)
        return run(torch.nn.functional.linear, x, weight, bias)

    return on_parts, tuple(made), used


def _embedding(
    run: Callable, ids: Any, weight: Any, padding_idx: int | None = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> tuple:  # fmt: skip
    _check(isinstance(ids, Given) and isinstance(weight, Given))
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Refused("it is an embedding that counts rows, limits them or has a sparse gradient")
    made = []
    for p, w in zip(ids.layout.placements, weight.layout.placements, strict=True):
        # A table that is split by words PyTorch runs (guards/sharded.py).
        _check(p.is_replicate() or (p.is_shard() and w.is_replicate()))
        made.append(mesh_types().Shard(ids.part.dim()) if w.is_shard() else p)
    return None, tuple(made), [ids.layout.placements, weight.layout.placements]


def _norm(
    run: Callable, x: Any, sizes: Sequence[int], weight: Any = None, bias: Any = None, *rest: Any, **named: Any
) -> tuple:
    bias = bias if isinstance(bias, Given) else None
    _check(isinstance(x, Given) and _is_whole(weight) and _is_whole(bias))
    first = x.part.dim() - len(sizes)
    _check(all(p.is_replicate() or (p.is_shard() and p.dim < first) for p in x.layout.placements))
    used = [given.layout.placements for given in (x, weight, bias) if given is not None]
    return None, x.layout.placements, used


def _dropout(run: Callable, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple:
    _check(isinstance(x, Given) and not inplace)
    if training and p and not all(p.is_shard() for p in x.layout.placements):
        raise Refused("it is a dropout of what all ranks have, whose masks would not be the same")
    return None, x.layout.placements, [x.layout.placements]


def _pointwise(run: Callable, *args: Any, **named: Any) -> tuple:
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


def _mean(run: Callable, x: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> tuple:
    _check(isinstance(x, Given) and keepdim and dim is not None)
    dims = {d % x.part.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,))}
    _check(all(p.is_replicate() or (p.is_shard() and p.dim not in dims) for p in x.layout.placements))
    return None, x.layout.placements, [x.layout.placements]


RULES: dict[str, Rule] = {
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
