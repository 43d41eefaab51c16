"""Makes numbers of NumPy's that are arguments operands of the graph, beside Python's (:mod:`symbolic_numbers`).

NumPy's arithmetic has types: what it computes with two numbers has the type of both together, and is rounded to it, or
wraps. The graph computes in that type, too. Whatever else asks NumPy for something reads the value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ortmodule.capture import scalar_guards
from ortmodule.capture.numbers import symbolic_numbers
from ortmodule.capture.numbers.symbolic_numbers import (
    Float,
    Int,
    as_given,
    as_type,
    differ,
    exact,
    is_one,
    near,
    of_size,
    read_condition,
    steady,
    value_of,
)
from ortmodule.core import pytree
from ortmodule.core.structures import numpy_values
from ortmodule.core.structures import tokens as pytree_tokens
from ortmodule.core.torch_private import get_tracing_state, make_subclass, untraced

#: The types that torch computes in as NumPy does.
_DTYPES: dict[Any, torch.dtype] = {
    numpy.float16: torch.float16, numpy.float32: torch.float32, numpy.float64: torch.float64, numpy.int8: torch.int8,
    numpy.int16: torch.int16, numpy.int32: torch.int32, numpy.int64: torch.int64, numpy.uint8: torch.uint8,
}  # fmt: skip
_KINDS = frozenset((*numpy_values.FLOATS, *numpy_values.INTEGERS))
_OF_WHOLE = (operator.floordiv, operator.mod, numpy.floor_divide, numpy.remainder)  # by zero NumPy gives 0
_POWERS = (operator.pow, numpy.power)
#: Where a last digit may decide much.
_ROUNDING = (numpy.floor, numpy.ceil, numpy.trunc, numpy.rint, numpy.sign)
_STEPS = (*_OF_WHOLE, *_ROUNDING)


class NumpyFloat(Float):
    __class__ = property(lambda self: self.scalar)  # for `isinstance(x, numpy.floating)`

    def __round__(self, digits: int | None = None) -> Any:
        return round(_item(self)) if digits is None else read(self).__round__(digits)


class NumpyInt(Int):
    __class__ = property(lambda self: self.scalar)

    def __round__(self, digits: int | None = None) -> Any:
        return _item(self) if digits is None else read(self).__round__(digits)


def traced(tensor: torch.Tensor, kind: type) -> Any:
    """What a trace has in place of the number in ``tensor``, of a type of Python's or NumPy's."""
    number: Any = symbolic_numbers.traced(tensor)
    return number if kind in (int, float) else typed(number, kind)


def typed(number: Any, kind: Any) -> Any:
    """A number of Python's as one of NumPy's."""
    return _known(numpy.asarray(as_given(number)).astype(kind)[()], number.tensor, number)


def _known(value: Any, tensor: torch.Tensor, *of: Any) -> Any:
    """The number ``value`` of NumPy's, which ``tensor`` has in the trace. ``of``: what it is computed from."""
    whole = type(value) in numpy_values.INTEGERS
    tensor = as_type(tensor, torch.int64 if whole else torch.float64)
    with untraced():
        number: Any = make_subclass(NumpyInt if whole else NumpyFloat, torch.zeros((), dtype=tensor.dtype))
    number.tensor, number.value, number.scalar, number.near = tensor, value.item(), type(value), near(of)
    number.exact = exact(of)
    tensor._ortmodule_number = True  # type: ignore[attr-defined]  # for `symbolic_numbers.stands_for_one`
    return number


def read(number: Any) -> Any:
    """Its value, which the graph is for from now on."""
    value_of(number)
    return as_given(number)


def _item(self: Any, *index: Any) -> Any:
    return symbolic_numbers.known(self.value, self.tensor, self)


def is_number(value: Any) -> bool:
    return is_one(value) or type(value) in (int, float, bool) or type(value) in _KINDS


def computed(compute: Callable, of_tensors: Callable, *operands: Any, wide: bool = False) -> Any:
    """``compute(*operands)``, which ``of_tensors`` computes in the trace, in the type of the result, or in float64 if
    ``wide``."""
    values = [as_given(each) if is_one(each) else each for each in operands]
    with untraced(), numpy.errstate(all="ignore"):  # (it is not forward that reads the setting)
        value = compute(*values)
    dtype = _DTYPES.get(type(value))
    steps = compute in _STEPS and near(operands)
    if steps and compute in _ROUNDING and steady(operands[0]):
        steps, operands = False, (_with_digits(operands[0]),)
    if dtype is None or get_tracing_state() is None or steps:
        for each in filter(is_one, operands):
            value_of(each)
        return value
    tensors = [_operand(each, torch.float64 if wide else dtype) for each in operands]
    if not dtype.is_floating_point and isinstance(tensors[-1], torch.Tensor):
        if compute in _OF_WHOLE:
            read_condition(tensors[-1] != 0)
        elif compute in _POWERS:
            read_condition(tensors[-1] >= 0)
    number = _known(value, as_type(of_tensors(*tensors), dtype), *operands)
    return symbolic_numbers.marked(number, operands) if compute in _POWERS and dtype.is_floating_point else number


def _with_digits(number: Any) -> Any:
    """A number whose last digits do not matter from now on."""
    found = symbolic_numbers.known(number.value, number.tensor)
    return found if number.scalar is None else typed(found, number.scalar)


def _operand(value: Any, dtype: torch.dtype) -> Any:
    if is_one(value):
        return as_type(value.tensor, dtype)
    return value.item() if type(value) in _KINDS else value


def _arithmetic(compute: Callable, of_tensors: Callable, backwards: bool) -> Callable:
    def method(self: Any, other: Any, *rest: Any) -> Any:
        other = of_size(other)
        if isinstance(other, numpy.ndarray) or rest:
            return compute(*(other, read(self)) if backwards else (read(self), other), *rest)
        if not is_number(other):
            return NotImplemented
        return computed(compute, of_tensors, *((other, self) if backwards else (self, other)))

    return method


def _comparison(compute: Callable) -> Callable:
    def method(self: Any, other: Any) -> Any:
        other = of_size(other)
        if isinstance(other, numpy.ndarray):
            return compute(read(self), other)
        if not is_number(other):
            return NotImplemented
        values = as_given(self), as_given(other) if is_one(other) else other
        outcome = compute(*values)
        try:
            dtype = _DTYPES.get(numpy.result_type(*values).type)
        except OverflowError:
            dtype = None
        if get_tracing_state() is None or dtype is None or not differ(self, other):
            for each in filter(is_one, (self, other)):
                value_of(each)
            return outcome
        return numpy.bool_(read_condition(compute(_operand(self, dtype), _operand(other, dtype))))

    return method


def _unary(compute: Callable) -> Callable:
    return lambda self: computed(compute, compute, self)


def _astype(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
    value = as_given(self).astype(dtype, *args, **kwargs)
    whole = type(value) in numpy_values.INTEGERS
    if type(value) not in _DTYPES or (whole and not steady(self)):
        return read(self).astype(dtype, *args, **kwargs)
    return _known(value, as_type(self.tensor, _DTYPES[type(value)]), *(() if whole else (self,)))


def _array(self: Any, *args: Any, **kwargs: Any) -> Any:
    scalar_guards.converts(1)
    return numpy.array(read(self), *args, **kwargs)


def _method(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(read(self), name)(*args, **kwargs)


def _attribute(name: str) -> property:
    of_type = name in ("dtype", "shape", "ndim", "size", "itemsize", "nbytes", "strides")
    return property(lambda self: getattr(self.scalar(0) if of_type else read(self), name))


#: What Python asks of all objects, and numbers of Python's answer as well.
_LEFT = frozenset(dir(object)) - {"__repr__", "__str__", "__format__"}
_LEFT |= {"__bool__", "__int__", "__float__", "__index__", "__divmod__", "__rdivmod__", "__round__", "__buffer__"}
_LEFT |= {"__class_getitem__", "__setstate__", "__trunc__", "__floor__", "__ceil__"}


def _define(kind: Any, of: type) -> None:
    for name, (compute, of_tensors) in symbolic_numbers.BINARY.items():
        of_tensors = symbolic_numbers.tensor_first(of_tensors)
        setattr(kind, f"__{name}__", _arithmetic(compute, of_tensors, False))
        setattr(kind, f"__i{name}__", getattr(kind, f"__{name}__"))
        setattr(kind, f"__r{name}__", _arithmetic(compute, of_tensors, True))
    for name in symbolic_numbers.COMPARED:
        setattr(kind, f"__{name}__", _comparison(getattr(operator, name)))
    for name in ("neg", "pos", "abs"):
        setattr(kind, f"__{name}__", _unary(getattr(operator, name)))
    kind.item = kind.tolist = _item
    kind.astype, kind.__array__ = _astype, _array
    kind.__copy__ = kind.__deepcopy__ = lambda self, *_: self
    for name in dir(of):
        if name not in vars(kind) and name not in _LEFT and not name.startswith("__array"):
            setattr(kind, name, _method(name) if callable(getattr(of, name)) else _attribute(name))
    kind.__hash__ = Float.__hash__


_define(NumpyFloat, numpy.float64)
_define(NumpyInt, numpy.int64)


class _Kind:
    """How such a number is written among tokens; in a result as one that is computed from sizes, of its type."""

    container = False

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        if writer.results:
            writer.tokens += (pytree_tokens.AS, value.scalar, pytree_tokens.TENSOR)
        else:
            writer.tokens += (pytree_tokens.NUMBER, value.scalar)
        writer.tensors.append(value.tensor)


pytree.register(NumpyFloat, _Kind)
pytree.register(NumpyInt, _Kind)
