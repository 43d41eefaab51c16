"""Defines pools and resizing for the forms of arguments that the exporter does not take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ortmodule.core.errors import Keep
from ortmodule.lowering.decompositions.table import defines

#: A number for all dimensions, or one for each.
Sizes = int | list[int] | tuple[int, ...]


def _max_pool(n: int, indices: bool) -> Callable:
    """Without a batch; with one number for all dimensions."""

    def define(
        x: Tensor, kernel: Sizes, stride: Sizes = (), padding: Sizes = 0, dilation: Sizes = 1, ceil_mode: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        lists = [list(v) if isinstance(v, (list, tuple)) else [v] for v in (kernel, stride, padding, dilation)]
        if x.dim() == n + 2 and all(len(v) in (0, n) for v in lists):
            raise Keep
        kernel, stride, padding, dilation = (v * n if len(v) == 1 else v for v in lists)
        whole = x.unsqueeze(0) if x.dim() == n + 1 else x
        pool = getattr(F, f"max_pool{n}d")
        results = pool(whole, kernel, stride or kernel, padding, dilation, ceil_mode, indices)
        results = results if indices else (results,)
        results = [r.squeeze(0) if x.dim() == n + 1 else r for r in results]
        return tuple(results) if indices else results[0]

    return define


for _n in (1, 2, 3):
    defines(f"aten::max_pool{_n}d", recursive=True)(_max_pool(_n, False))
    defines(f"aten::max_pool{_n}d_with_indices", recursive=True)(_max_pool(_n, True))


@defines("aten::max_unpool2d", "aten::max_unpool3d", sizes=True)
def _max_unpool(x: Tensor, index: Tensor, size: list[int], *_: Any) -> Tensor:
    """Elements that no index names are zero."""
    rank = len(size)
    before = list(x.shape[: x.dim() - rank])
    flat = torch.zeros([*before, math.prod(size)], dtype=x.dtype)
    return flat.scatter(-1, index.flatten(-rank), x.flatten(-rank)).reshape([*before, *size])


@defines(*(f"aten::_upsample_nearest_exact{n}d" for n in (1, 2, 3)), sizes=True)
def _nearest_exact(x: Tensor, size: list[int] | None, *factors: Any) -> Tensor:
    """Every place takes the element whose middle is nearest."""
    each = factors[0] if len(factors) == 1 and isinstance(factors[0], list) else factors
    rank = x.dim() - 2
    for d in range(rank):
        n = int(x.shape[2 + d])
        factor: Any = each[d] if d < len(each) else None
        wanted = size[d] if size is not None else math.floor(n * factor)
        step = n / wanted if factor is None or factor <= 0 else 1 / factor
        places = ((torch.arange(wanted, dtype=torch.float32) + 0.5) * step).floor().long().clamp(max=n - 1)
        x = x.index_select(2 + d, places)
    return x


@defines("aten::alpha_dropout")
def _alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(x, p, train, x)


@defines("aten::feature_alpha_dropout")
def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(x, p, train, x[(slice(None), slice(None), *[slice(0, 1)] * (x.dim() - 2))])


def _alpha(x: Tensor, p: float, train: bool, like: Tensor) -> Tensor:
    """What is dropped takes the value that keeps mean and variance of a SELU's result."""
    if not train or p == 0:
        return x
    if p >= 1:
        raise Keep
    alpha = 1.7580993408473766
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    kept = F.dropout(torch.ones_like(like.detach()), p) > 0
    return torch.where(kept, x, -alpha) * scale + alpha * p * scale


def _layer_by_layer(kind: str) -> Callable:
    """Recurrent layers one after the other where there is dropout between them."""
    run = getattr(torch, kind)
    states = 2 if kind == "lstm" else 1

    def define(
        x: Tensor, state: Any, parameters: Any, biases: bool, layers: Any = None, dropout: float = 0.0,
        train: bool = False, both: bool = False, batch_first: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # A packed sequence comes with its batch sizes, as a tensor, and has other arguments behind it.
        if isinstance(batch_first, list) or not isinstance(parameters, list) or not (train and dropout and layers > 1):
            raise Keep
        state = state if isinstance(state, list) else [state]
        width, each = 2 if both else 1, len(parameters) // layers
        last = []
        for i in range(layers):
            own = [s[i * width : (i + 1) * width] for s in state]
            own = own if states == 2 else own[0]
            part = parameters[i * each : (i + 1) * each]
            x, *then = run(x, own, part, biases, 1, 0.0, train, both, batch_first)
            last.append(then)
            x = F.dropout(x, dropout) if i < layers - 1 else x
        return (x, *(torch.cat(parts) for parts in zip(*last, strict=True)))

    return define


for _kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    defines(f"aten::{_kind}", recursive=True)(_layer_by_layer(_kind))
