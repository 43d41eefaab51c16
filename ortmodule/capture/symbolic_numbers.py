"""Makes Python numbers of the caller's, which change from call to call, operands of the graph.

In a trace such an argument is a `float` or an `int` that also knows a traced tensor of rank 0. Arithmetic with it gives
another one; a torch function takes the tensor in its place; a comparison is a read that a run compares. Whatever else
Python does with it (a size, an index, text) reads its value, for which the graph then is.

What C code takes out of it without asking (also a float that an `int` of these is added to) stays in the graph as a
constant. Two traces have other numbers, so that is found, and the call is captured for its values alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortmodule.capture import scalar_guards
from ortmodule.core import pytree
from ortmodule.core.torch_private import get_tracing_state

_NARROW = (torch.bfloat16, torch.float16)


class _Number:
    """What `Float` and `Int` have in common. ``tensor``: traced, of rank 0, float64 or int64."""

    tensor: torch.Tensor

    def __bool__(self) -> bool:
        return _read(self.tensor != 0)

    def __hash__(self) -> int:
        return hash(_value(self))

    def __reduce__(self) -> Any:
        return (type(_value(self)), (_value(self),))


class Float(_Number, float):
    pass


class Int(_Number, int):
    pass


def traced(tensor: torch.Tensor) -> float | int:
    """What a trace has in place of the number in ``tensor``."""
    return _made(scalar_guards.untraced_item(tensor), tensor)


def _made(value: Any, tensor: torch.Tensor) -> Any:
    if type(value) not in (int, float):
        return value
    number = Float(value) if type(value) is float else Int(value)
    number.tensor = tensor
    tensor.stands_for_a_number = True  # type: ignore[attr-defined]  # for `stands_for_one`
    return number


def stands_for_one(tensor: torch.Tensor) -> bool:
    """Is it the tensor of such a number?"""
    return getattr(tensor, "stands_for_a_number", False)


def _plain(number: Any) -> Any:
    """Its value, of which no read is noted."""
    return float.__float__(number) if isinstance(number, float) else int.__int__(number)


def _value(number: Any) -> Any:
    """Its value, which the graph is for from now on."""
    if get_tracing_state() is not None:
        scalar_guards.read(number.tensor)
    return _plain(number)


def _read(condition: torch.Tensor) -> bool:
    scalar_guards.read(condition)
    return bool(scalar_guards.untraced_item(condition))


# --- Python's arithmetic ----------------------------------------------------------------------------------------------


def _wide(value: Any, wide: bool) -> Any:
    """An operand: a tensor, float64 if ``wide``, or a plain number."""
    tensor = value.tensor if isinstance(value, _Number) else value
    return tensor.to(torch.float64) if wide and isinstance(tensor, torch.Tensor) else tensor


def _arithmetic(name: str, compute: Callable, of_tensors: Callable, backwards: bool) -> Callable:
    def method(self: Any, other: Any, *rest: Any) -> Any:
        if type(other) not in (int, float, bool) and not isinstance(other, _Number):
            return NotImplemented
        a, b = (other, self) if backwards else (self, other)
        if rest or get_tracing_state() is None:
            return compute(*[_value(x) if isinstance(x, _Number) else x for x in (a, b)], *rest)
        value = compute(*[_plain(x) if isinstance(x, _Number) else x for x in (a, b)])
        wide = isinstance(a, float) or isinstance(b, float) or compute in (operator.truediv, operator.pow)
        return _made(value, of_tensors(_wide(a, wide), _wide(b, wide)))

    method.__name__ = name
    return method


_BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (operator.add, operator.add),
    "sub": (operator.sub, operator.sub),
    "mul": (operator.mul, operator.mul),
    "truediv": (operator.truediv, torch.true_divide),
    "floordiv": (operator.floordiv, torch.floor_divide),
    "mod": (operator.mod, torch.remainder),
    "pow": (operator.pow, torch.pow),
}
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


def _tensor_first(function: Callable) -> Callable:
    """`function`, whose first operand may be a plain number."""

    def call(a: Any, b: Any) -> torch.Tensor:
        return function(a if isinstance(a, torch.Tensor) else torch.full_like(b, a), b)

    return call


def _comparison(name: str) -> Callable:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if type(other) not in (int, float, bool) and not isinstance(other, _Number):
            return NotImplemented
        if get_tracing_state() is None:
            return compute(_plain(self), other)
        return _read(compute(_wide(self, True), _wide(other, True)))

    return method


def _unary(name: str) -> Callable:
    compute = getattr(operator, name)
    return lambda self: _made(compute(_plain(self)), compute(self.tensor))


def _reading(kind: type, name: str) -> Callable:
    original = getattr(kind, name)
    return lambda self, *args: original(_value(self), *args)


for _kind in (Float, Int):
    _plain_kind = float if _kind is Float else int
    for _name, (_compute, _of_tensors) in _BINARY.items():
        setattr(_kind, f"__{_name}__", _arithmetic(_name, _compute, _tensor_first(_of_tensors), False))
        setattr(_kind, f"__r{_name}__", _arithmetic(_name, _compute, _tensor_first(_of_tensors), True))
    for _name in _COMPARED:
        setattr(_kind, f"__{_name}__", _comparison(_name))
    for _name in ("neg", "pos", "abs"):
        setattr(_kind, f"__{_name}__", _unary(_name))
    for _name in ("__int__", "__float__", "__index__", "__trunc__", "__floor__", "__ceil__", "__round__", "__repr__",
                  "__str__", "__format__", "__divmod__", "__rdivmod__", "is_integer", "as_integer_ratio", "hex",
                  "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__invert__", "bit_length"):  # fmt: skip
        if hasattr(_plain_kind, _name):
            setattr(_kind, _name, _reading(_plain_kind, _name))


# --- torch's functions ------------------------------------------------------------------------------------------------


def _functions(names: str) -> frozenset[Any]:
    """torch's and its tensors' functions of these names."""
    return frozenset(getattr(o, n) for o in (torch, torch.Tensor) for n in names.split() if hasattr(o, n))


_DIVIDING = _functions("div divide true_divide __truediv__ __rtruediv__ __div__ __rdiv__")
_PROMOTING = _DIVIDING | _functions(
    "add sub subtract mul multiply pow rsub maximum minimum __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __pow__ "
    "__rpow__"
)
_IN_PLACE = {
    getattr(torch.Tensor, name): getattr(torch.Tensor, without)
    for without in ("add", "sub", "mul", "div", "true_divide", "pow")
    for name in (f"{without}_", f"__i{without.replace('true_divide', 'truediv')}__")
    if hasattr(torch.Tensor, name)
}
_COMPARING = _functions("lt le gt ge eq ne __lt__ __le__ __gt__ __ge__ __eq__ __ne__")


def is_among(args: Sequence[Any]) -> bool:
    """Is one of these a number that knows a tensor, or has such a one in a list?"""
    return any(is_among(a) if type(a) in (tuple, list) else isinstance(a, _Number) for a in args)


def call(function: Callable, args: tuple, kwargs: dict[str, Any], run: Callable) -> Any:
    """``run(function, args, kwargs)``, with tensors in place of numbers where the function takes such."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if function in _PROMOTING and len(args) == 2 and len(tensors) == 1 and not kwargs:
        return _promoting(function, args, tensors[0], run)
    if function in _IN_PLACE and len(args) == 2 and isinstance(args[0], torch.Tensor) and not kwargs:
        result = run(_IN_PLACE[function], args, {})
        return run(torch.Tensor.copy_, (args[0], result), {})
    if function in _COMPARING and len(args) == 2 and len(tensors) == 1 and not kwargs:
        dtype = _type_beside(tensors[0], args)
        operands = tuple(a.tensor.to(dtype) if isinstance(a, _Number) else a.to(dtype) for a in args)
        return run(function, operands, {})
    if type(function).__name__ == "function":  # Python code, whose operators are met again
        return run(function, tuple(map(_default, args)), {name: _default(a) for name, a in kwargs.items()})
    return run(function, _read_all(args), {name: _read_all((a,))[0] for name, a in kwargs.items()})


def _default(argument: Any) -> Any:
    """The tensor of a number, of the type that a tensor of Python's would have; other arguments as they are."""
    if isinstance(argument, Float):
        return argument.tensor.to(torch.get_default_dtype())
    return argument.tensor if isinstance(argument, Int) else argument


def _type_beside(tensor: torch.Tensor, args: tuple) -> torch.dtype:
    return torch.result_type(tensor, 1.5 if any(isinstance(a, Float) for a in args) else 1)


def _promoting(function: Callable, args: tuple, tensor: torch.Tensor, run: Callable) -> Any:
    """A number beside a tensor has the tensor's type, or the default one; of 16 bits it is float32 meanwhile."""
    dtype = _type_beside(tensor, args)
    if function in _DIVIDING and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    between = torch.float32 if dtype in _NARROW else dtype
    operands = tuple(a.tensor.to(between) if isinstance(a, _Number) else a.to(between) for a in args)
    result = run(function, operands, {})
    return result.to(dtype) if between is not dtype else result


def _read_all(args: Sequence[Any]) -> tuple:
    return tuple(
        type(a)(_read_all(a)) if type(a) in (tuple, list) else _value(a) if isinstance(a, _Number) else a for a in args
    )


class _Kind:
    """How such a number is written among tokens; in a result as one that is computed from sizes, like a tensor."""

    container = False

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens += (pytree.TENSOR,) if writer.results else (pytree.NUMBER, float if cls is Float else int)
        writer.tensors.append(value.tensor)


pytree.register(Float, _Kind)
pytree.register(Int, _Kind)
