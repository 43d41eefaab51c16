"""Translates operators that draw random numbers to ONNX, and those that fill a tensor with them.

What has a distribution of the engine's is drawn there; another one (`cauchy_`, `randperm`, ...) PyTorch draws inside
the graph. `runtime/rng_replay.py` says how PyTorch's calls follow from what the engine draws, and
`capture/self_check.py` what stands for a draw while a graph is checked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ortmodule.core.dtypes import ONNX_TYPES
from ortmodule.core.errors import Keep, Leave
from ortmodule.core.torch_private import GraphContext, TracedValue, is_none, maybe_get_const
from ortmodule.lowering.decompositions.table import defines
from ortmodule.lowering.symbolics import refused, result_type, symbolic, typed_as_result

#: Operators that fill their operand: the form that makes a new tensor.
OUT_OF_PLACE = {
    "aten::bernoulli_": "aten::bernoulli",
    "aten::normal_": "aten::normal_functional",
    "aten::uniform_": "aten::uniform",
}
_DIGITS = {torch.bfloat16: 2**8, torch.float16: 2**11}
MOST = 2**53  # integers that float64 tells apart


def name_of(operator: Any) -> str:
    """That of an operator of ATen's that draws; the same for one that draws into a tensor it is given (`out`)."""
    name = str(operator).removeprefix("aten.").removesuffix(".default")
    return name.removesuffix("_out").removesuffix(".out")


def _leave_with(generator: object) -> None:
    if generator is not None:
        raise Leave("a draw from a generator of the module's")


def between(part: Tensor, low: Any, high: Any, dtype: torch.dtype) -> Tensor:
    """Numbers of an interval from ``part`` of it, which are in [0, 1); of 16 bits with as many digits as PyTorch's."""
    if dtype in _DIGITS:
        part = (part * _DIGITS[dtype]).floor() / _DIGITS[dtype]
    return part * (high - low) + low


def exponential(part: Tensor, rate: Any = 1.0) -> Tensor:
    """Numbers of the exponential distribution from ``part`` of [0, 1)."""
    return -torch.log1p(-part) / rate


def _wide(x: Tensor) -> torch.dtype:
    """What numbers are drawn in that are rounded to the type of ``x`` then."""
    return torch.float32 if x.dtype in _DIGITS else x.dtype


@defines("aten::uniform")
def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0, generator: object = None) -> Tensor:
    _leave_with(generator)
    return between(torch.rand_like(x, dtype=_wide(x)), low, high, x.dtype).to(x.dtype)


@defines("aten::normal_functional")
def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0, generator: object = None) -> Tensor:
    _leave_with(generator)
    return (torch.randn_like(x, dtype=_wide(x)) * std + mean).to(x.dtype)


@defines("aten::exponential")
def _exponential(x: Tensor, rate: float = 1.0, generator: object = None) -> Tensor:
    return exponential(torch.rand_like(x, dtype=_wide(x)), rate).to(x.dtype)


@defines("aten::alpha_dropout")
def _alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _dropped_to_floor(x, p, train, x)


@defines("aten::feature_alpha_dropout")
def _feature_alpha_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    return _dropped_to_floor(x, p, train, x[(slice(None), slice(None), *([slice(0, 1)] * (x.dim() - 2)))])


def _dropped_to_floor(x: Tensor, p: float, train: bool, like: Tensor) -> Tensor:
    """What SELU keeps mean and variance with: what is dropped is its lowest value."""
    if not train or p == 0:
        return x * 1
    if p == 1:
        return x * 0
    lowest = 1.7580993408473766
    factor = 1 / math.sqrt((lowest * lowest * p + 1) * (1 - p))
    kept = torch.bernoulli(torch.ones_like(like), 1 - p)
    return x * (kept * factor) + ((kept - 1) * (lowest * factor) + lowest * factor * p)


@defines("aten::multinomial", recursive=True)
def _of_one_row(x: Tensor, count: int, replacement: bool = False, generator: object = None) -> Tensor:
    """Where the engine draws, it is from rows."""
    if x.dim() != 1 or generator is not None or (count > 1 and not replacement):
        raise Keep
    return torch.multinomial(x[None], count, replacement)[0]


def _check_generator(generator: TracedValue) -> None:
    if not is_none(generator):
        raise refused("a draw from a generator of the module's", generator)


def _with_sizes(g: Any, sizes: TracedValue) -> TracedValue:
    """A tensor with these sizes."""
    known = maybe_get_const(sizes, "is")
    if isinstance(known, (list, tuple)):
        sizes = g.op("Constant", value_t=torch.tensor(known, dtype=torch.int64))
    return g.op("ConstantOfShape", sizes, value_t=torch.zeros(1))


def _number(g: Any, value: TracedValue | None, dtype: torch.dtype) -> TracedValue:
    """A number that is a constant or computed, or a tensor; none is 0."""
    known = 0 if value is None else maybe_get_const(value, "f" if dtype.is_floating_point else "i")
    if isinstance(known, (int, float)):
        return g.op("Constant", value_t=torch.tensor(known, dtype=dtype))
    return g.op("Cast", value, to_i=ONNX_TYPES[dtype])


@symbolic("aten::bernoulli")
def _bernoulli(g: GraphContext, x: TracedValue, *rest: TracedValue) -> TracedValue:
    """Of a tensor of probabilities, or with the sizes of a tensor and one or more probabilities."""
    *p, generator = rest
    _check_generator(generator)
    probabilities = x
    if p:
        known = maybe_get_const(p[0], "f")
        if isinstance(known, (int, float)):
            p = [g.op("Constant", value_t=torch.tensor(known, dtype=torch.float64))]
        probabilities = g.op("Expand", p[0], g.op("Shape", x))
    return typed_as_result(g, g.op("Bernoulli", probabilities, dtype_i=ONNX_TYPES[result_type(g)]))


@symbolic("aten::randint")
def _integers_of_sizes(g: GraphContext, *values: TracedValue) -> TracedValue:
    """Of (high, sizes) or (low, high, sizes), with a generator or without, and four options."""
    *bounds, sizes = _without_generator(values[:-4])
    return _integers(g, _with_sizes(g, sizes), bounds)


@symbolic("aten::randint_like")
def _integers_like(g: GraphContext, *values: TracedValue) -> TracedValue:
    """Of (x, high) or (x, low, high), with a generator or without, and five options."""
    like, *bounds = _without_generator(values[:-5])
    return _integers(g, like, bounds)


def _without_generator(values: tuple[TracedValue, ...]) -> tuple[TracedValue, ...]:
    if is_none(values[-1]):
        return values[:-1]
    if "Generator" in values[-1].type().annotation_str:
        _check_generator(values[-1])
    return values


def _integers(g: GraphContext, like: TracedValue, bounds: list[TracedValue]) -> TracedValue:
    """A part of a range: float64 has enough digits for each to be as likely as the others."""
    wide, whole, dtype = torch.float64, torch.int64, result_type(g)
    known = [maybe_get_const(bound, "i") for bound in bounds]
    if max(abs(bound) if isinstance(bound, int) else 0 for bound in known) > MOST // 2:
        raise refused("a draw from more than 2^52 numbers", like)
    low, high = (bounds[0] if len(bounds) > 1 else None), bounds[-1]
    count = g.op("Sub", _number(g, high, wide), _number(g, low, wide))
    part = g.op("RandomUniformLike", like, dtype_i=ONNX_TYPES[wide])
    drawn = g.op("Cast", g.op("Floor", g.op("Mul", part, count)), to_i=ONNX_TYPES[whole])
    drawn = g.op("Add", drawn, _number(g, low, whole))
    return typed_as_result(g, drawn if dtype == whole else g.op("Cast", drawn, to_i=ONNX_TYPES[dtype]))


@symbolic("aten::normal")
def _normal_of(g: GraphContext, mean: TracedValue, std: TracedValue, *rest: TracedValue) -> TracedValue:
    """Of (mean, deviation, generator), of which one at least is a tensor, or of numbers, sizes, and four options."""
    sizes, generator = (None, rest[0]) if len(rest) == 1 else (rest[0], None if len(rest) < 6 else rest[1])
    if generator is not None:
        _check_generator(generator)
    dtype = result_type(g)
    mean, std = (_number(g, value, dtype) for value in (mean, std))
    like = g.op("Add", mean, std) if sizes is None else _with_sizes(g, sizes)
    drawn = g.op("RandomNormalLike", like, dtype_i=ONNX_TYPES[dtype])
    return typed_as_result(g, g.op("Add", g.op("Mul", drawn, std), mean))
