"""Holds the places of numbers, lists and arrays that Python and NumPy draw, in a trace.

Each draw is a host node, which draws in every run. A number is a symbolic one, a list one of these. An array is a
:class:`DrawnArray`, which passes for NumPy's: what NumPy computes with it is a node, too, and torch takes its tensor.
Whatever else asks for the values is a decision by chance.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy
import torch

from ortmodule.capture.numbers import symbolic_numbers
from ortmodule.capture.scalar_guards import user_line
from ortmodule.core import pytree
from ortmodule.core.errors import Disagrees, NotTraceable

MOST_NUMBERS = 256  # of a list
_TYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_DTYPES = frozenset(map(numpy.dtype, _TYPES))
_RANGE, _ARRAY = "range", "array"
_INT64 = 1 << 63

_MADE: dict[str, Callable] = {_RANGE: range, _ARRAY: numpy.array, "slice": slice, "dtype": numpy.dtype}

#: Makes a node of a function that gives one tensor: (its name, the function, its arguments).
NodeMaker = Callable[[str, Callable[..., torch.Tensor], tuple, dict[str, Any]], torch.Tensor]


def _tensor_of(value: Any) -> tuple[torch.Tensor, Any]:
    """What was drawn as a tensor, and its kind: `float`, `int`, lists of these, or the type of an array."""
    if isinstance(value, numpy.ndarray):
        if value.dtype not in _DTYPES:
            raise NotTraceable(f"NumPy makes an array of {value.dtype}")
        return torch.from_numpy(numpy.ascontiguousarray(value).copy()), value.dtype
    if isinstance(value, numpy.generic):
        value = value.item()
    if type(value) is float or (type(value) is int and -_INT64 <= value < _INT64):
        return torch.tensor(value, dtype=torch.float64 if type(value) is float else torch.int64), type(value)
    if type(value) is list and value and len({*map(type, value)}) == 1 and type(value[0]) in (int, float):
        return torch.tensor(value, dtype=torch.float64 if type(value[0]) is float else torch.int64), [type(value[0])]
    raise NotTraceable("NumPy makes something else than numbers")


def draw(make: NodeMaker, function: Callable, args: tuple, kwargs: dict[str, Any], between: Any) -> Any:
    """What stands for `function(*args, **kwargs)`, drawn in every run. ``between``: the ends of a number, if they are
    known. Raises NotTraceable."""
    kinds: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor, kind = _tensor_of(function(*map(_plain, args), **{name: _plain(a) for name, a in kwargs.items()}))
        if kinds and kinds[0] != kind:
            raise Disagrees(f"{function.__name__} makes another kind of value than before")
        kinds[:] = [kind]
        return tensor

    args, kwargs = tuple(map(_operand, args)), {name: _operand(a) for name, a in kwargs.items()}
    tensor = make(function.__name__, run, args, kwargs)
    kind = kinds[0]
    if isinstance(kind, numpy.dtype):
        return DrawnArray(make, tensor, kind)
    if type(kind) is list:
        return _numbers_in(tensor)
    number: Any = symbolic_numbers.traced(tensor)
    number.between = between
    return number


def _numbers_in(tensor: torch.Tensor) -> list[Any]:
    if tensor.numel() > MOST_NUMBERS:
        raise NotTraceable(f"a draw of more than {MOST_NUMBERS} numbers")
    return [symbolic_numbers.traced(part) for part in tensor.unbind()]


def _operand(value: Any) -> Any:
    """An argument of a node, of which two traces see whether it is the same."""
    if is_array(value):
        return value.tensor
    if symbolic_numbers.is_one(value):
        return value.tensor
    if type(value) is range:
        return (_RANGE, value.start, value.stop, value.step)
    if type(value) is slice:
        return ("slice", value.start, value.stop, value.step)
    if isinstance(value, numpy.dtype) or (isinstance(value, type) and issubclass(value, numpy.generic)):
        return ("dtype", numpy.dtype(value).str)
    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) is numpy.ndarray:
        if value.size > MOST_NUMBERS or value.dtype not in _DTYPES:
            raise NotTraceable(f"NumPy computes with an array of {value.size} values, which a graph does not see")
        return (_ARRAY, value.tolist(), _operand(value.dtype))
    return type(value)(map(_operand, value)) if type(value) in (list, tuple) else value


def _plain(value: Any) -> Any:
    """The argument again."""
    if isinstance(value, torch.Tensor):
        array = value.numpy()
        array.flags.writeable = False  # what NumPy changed in it would change nothing of forward's
        return array if value.dim() else array[()]
    if type(value) is tuple and value and type(value[0]) is str and value[0] in _MADE:
        return _MADE[value[0]](*map(_plain, value[1:]))
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def is_array(value: Any) -> bool:
    return issubclass(type(value), DrawnArray)


def is_among(args: Sequence[Any]) -> bool:
    """Is one of these such an array, or has one in a tuple or a list?"""
    return any(is_among(a) if type(a) in (tuple, list) else is_array(a) for a in args)


def given_to_torch(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """A call of torch's with tensors in place of drawn arrays, where it may be given such. Raises NotTraceable."""
    if function in _MAKING and len(args) == 1 and (made := _stacked(args[0])) is not None:
        if any(a for name, a in kwargs.items() if name not in ("dtype", "device")):
            raise NotTraceable(f"{user_line()} makes a tensor of an array, with {', '.join(kwargs)}")
        kwargs = {name: a for name, a in kwargs.items() if a is not None}
        return torch.Tensor.to, (made,), {"dtype": made.dtype, "copy": function is torch.tensor} | kwargs
    if function is torch.Tensor.new_tensor and len(args) == 2 and is_array(args[1]) and not kwargs:
        return torch.Tensor.to, (args[1].tensor,), {"dtype": args[0].dtype, "device": args[0].device, "copy": True}
    if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
        return function, tuple(map(_tensor_in, args)), kwargs
    raise NotTraceable(f"{user_line()} gives torch an array {_first(args).origin}")


_MAKING = (torch.tensor, torch.as_tensor, torch.asarray)


def _stacked(value: Any) -> torch.Tensor | None:
    """The tensor of an array, or of a list of arrays of one type."""
    if is_array(value):
        return value.tensor
    if type(value) in (list, tuple) and all(map(is_array, value)) and len({each.dtype for each in value}) == 1:
        return torch.stack([each.tensor for each in value])
    return None


def _first(args: Sequence[Any]) -> Any:
    """The first array in these arguments."""
    inside = (_first(a) if type(a) in (tuple, list) else a for a in args)
    return next((each for each in inside if is_array(each)), DrawnArray)


def _tensor_in(value: Any) -> Any:
    if is_array(value):
        return value.tensor
    return tuple(map(_tensor_in, value)) if type(value) is tuple else value


class DrawnArray(dict):
    """An array that a generator of NumPy's draws, or that is computed from such ones.

    An index that is a sequence torch takes apart, and a dictionary is none."""

    __class__ = property(lambda self: numpy.ndarray)  # for `isinstance(x, numpy.ndarray)`
    __hash__ = None  # as NumPy's
    origin = "that is drawn"

    def __init__(self, make: NodeMaker, tensor: torch.Tensor, dtype: numpy.dtype) -> None:
        super().__init__()
        self.make, self.tensor, self.dtype = make, tensor, dtype

    def as_tensor(self) -> torch.Tensor:
        """What `torch.from_numpy` makes of it."""
        return self.tensor.clone()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.dim()

    @property
    def size(self) -> int:
        return self.tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def __contains__(self, value: Any) -> bool:
        self._decides()

    def __repr__(self) -> str:
        self._decides()

    def _decides(self) -> NoReturn:
        raise NotTraceable(f"{user_line()} looks at an array {self.origin}, and what forward does depends on it")

    def copy(self) -> Any:
        return self.computed(method("copy"), (self,), {})

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def tolist(self) -> Any:
        if self.tensor.dim() != 1 or self.dtype.kind not in "fi":
            self._decides()
        return _numbers_in(self.tensor.to(torch.float64 if self.dtype.kind == "f" else torch.int64))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # NumPy asks for `__array__` then
            raise AttributeError(name)
        if name not in _METHODS:
            raise NotTraceable(f"{user_line()} asks for {name} of an array {self.origin}")
        return lambda *args, **kwargs: self.computed(method(name), (self, *args), kwargs)

    def computed(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What NumPy computes."""
        if "out" in kwargs:
            self._decides()
        return draw(self.make, function, args, kwargs, None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return self.computed(getattr(ufunc, method) if method != "__call__" else ufunc, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.computed(function, args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._decides()

    def __bool__(self) -> bool:
        self._decides()

    __float__ = __int__ = __index__ = __setitem__ = __iadd__ = __imul__ = __isub__ = __itruediv__ = __array__


def method(name: str) -> Callable:
    """Calls the array's method of that name."""

    def call(array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, name)(*args, **kwargs)

    call.__name__ = name
    return call


_METHODS = frozenset((
    "astype", "reshape", "clip", "sum", "mean", "std", "var", "min", "max", "argsort", "argmin", "argmax",
    "cumsum", "flatten", "ravel", "round", "squeeze", "transpose", "repeat", "item",
))  # fmt: skip
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor",
)  # fmt: skip


def _set_operators() -> None:
    for name in _OPERATORS:
        function = getattr(operator, f"__{name}__")

        def forwards(self: Any, other: Any, function: Any = function) -> Any:
            return NotImplemented if _is_torchs(other) else self.computed(function, (self, other), {})

        def backwards(self: Any, other: Any, function: Any = function) -> Any:
            return NotImplemented if _is_torchs(other) else self.computed(function, (other, self), {})

        setattr(DrawnArray, f"__{name}__", forwards)
        setattr(DrawnArray, f"__r{name}__", backwards)
    for name in ("neg", "abs", "pos", "invert"):
        unary = getattr(operator, f"__{name}__")
        setattr(DrawnArray, f"__{name}__", lambda self, unary=unary: self.computed(unary, (self,), {}))
    setattr(DrawnArray, "__getitem__", lambda self, index: self.computed(operator.getitem, (self, index), {}))  # noqa: B010


def _is_torchs(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not symbolic_numbers.is_one(value)


_set_operators()


class _Kind:
    """A result of forward cannot hold such an array."""

    container = False

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        raise NotTraceable("forward returns, or keeps, an array that is drawn")


pytree.register(DrawnArray, _Kind)
