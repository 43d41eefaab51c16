"""Makes Python numbers operands of the graph: arguments that change from call to call, and numbers from data.

In a trace such a number is an object that passes for a `float` or an `int` and knows a traced tensor of rank 0.
Arithmetic with it gives another one; a torch function takes the tensor in its place, as a factor, a size, a bound or an
index; a comparison is a read that a run compares. Whatever else asks for its value (`range(n)`, `layers[n]`, text)
reads that, and the graph is for this value.

Of some functions (`math.log(n)`) the graph has another last digit than Python, so such numbers know what they follow
from (`near`): where the last digit may decide something, that is read.

It is no subclass of `float` or `int`, whose values C code takes without asking, but one of `Tensor`, which torch's
functions take for a number while a module is traced.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F

from ortmodule.capture import scalar_guards
from ortmodule.capture.numbers.size_arithmetic import conditions_of_range
from ortmodule.core import pytree
from ortmodule.core.errors import NotTraceable
from ortmodule.core.size_expr import near_parts, number_of
from ortmodule.core.structures import tokens as pytree_tokens
from ortmodule.core.torch_private import get_tracing_state, make_subclass, no_torch_function, untraced

_NARROW = (torch.bfloat16, torch.float16)
_EXACT = 2**53  # what whole numbers are below that a fraction has
_DIGITS = 1e-9  # what last digits may make of a number, of it and of 1


class _Number(torch.Tensor):
    """What `Float` and `Int` have in common. ``tensor``: traced, of rank 0, float64 or int64. ``value``: Python's."""

    tensor: torch.Tensor
    value: Any
    scalar: Any = None  # the type, if that is one of NumPy's
    between: tuple[float, float] | None = None  # of one that is drawn: it lies between these
    near: tuple[Any, ...] = ()  # of one whose last digits are not Python's in the graph: the numbers it follows from
    exact: torch.Tensor | None = None  # of such a one: are the digits Python's nevertheless? None: it is not known
    __torch_function__ = no_torch_function

    def __bool__(self) -> bool:
        return read_condition(self.tensor != 0) if differ(self, 0) else bool(value_of(self))

    def __hash__(self) -> int:
        return hash(value_of(self))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        scalar_guards.converts(1)
        return numpy.array(value_of(self), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (type(self.value), (value_of(self),))


class Float(_Number):
    __class__ = property(lambda self: float)  # for `isinstance(x, float)`

    def __index__(self) -> int:
        raise TypeError("'float' object cannot be interpreted as an integer")


class Int(_Number):
    __class__ = property(lambda self: int)  # as above


def traced(tensor: torch.Tensor) -> float | int:
    """What a trace has in place of the number in ``tensor``."""
    return known(scalar_guards.untraced_item(tensor), tensor)


def known(value: Any, tensor: torch.Tensor, *of: Any) -> Any:
    """The number ``value``, which ``tensor`` has in the trace, of rank 0, float64 or int64; others as they are.
    ``of``: what it is computed from."""
    if type(value) not in (int, float):
        return value
    whole = type(value) is int
    if tensor.is_floating_point() == whole:
        tensor = tensor.to(torch.int64 if whole else torch.float64)
    with untraced():
        number: Any = make_subclass(Int if whole else Float, torch.zeros((), dtype=tensor.dtype))
    number.tensor, number.value, number.near, number.exact = tensor, value, near(of), exact(of)
    tensor._ortmodule_number = True  # type: ignore[attr-defined]  # for `stands_for_one`
    return number


def of_size(value: Any) -> Any:
    """A number that is computed from sizes, which is a tensor in a trace, as such a number; others as they are."""
    if type(value) is not torch.Tensor or get_tracing_state() is None or (number := number_of(value)) is None:
        return value
    if not value.is_floating_point():
        return known(number, value)
    wide = value.to(torch.float64)
    with untraced():
        wide.fill_(number)  # in a trace fractions are float32
    found = known(number, wide)
    if near_parts(value):
        found.near = (known(number, wide),)
    return found


def as_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` as ``dtype``. Where it is that already, a trace would take the same tensor for a result."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def stands_for_one(tensor: torch.Tensor) -> bool:
    """Is it the tensor of such a number?"""
    return getattr(tensor, "_ortmodule_number", False)


def is_one(value: Any) -> bool:
    return issubclass(type(value), _Number)


def is_float(value: Any) -> bool:
    return issubclass(type(value), Float)


def near(numbers: Sequence[Any]) -> tuple[Any, ...]:
    """What those of these follow from whose last digits are not Python's."""
    return tuple(each for number in numbers if is_one(number) for each in number.near)


def marked(number: Any, operands: Sequence[Any]) -> Any:
    """``number``, a result whose last digits are not Python's."""
    found = filter(is_one, operands)
    number.near = tuple(root for each in found for root in (each.near or (each,)))
    return number


def exact(numbers: Sequence[Any]) -> torch.Tensor | None:
    """Are the digits of all of these Python's? None: it is not known, or those of all are."""
    found = [number.exact for number in numbers if is_one(number) and number.near]
    return None if not found or any(each is None for each in found) else functools.reduce(operator.and_, found)


def differ(a: Any, b: Any) -> bool:
    """Do these, a number and another one, differ by more than digits that are not Python's?"""
    if not near((a, b)):
        return True
    same = exact((a, b))
    a, b = (_wide(each.item() if isinstance(each, numpy.number) else each, True) for each in (a, b))
    return _either(abs(a - b) > _DIGITS * (abs(a) + abs(b) + 1), same)


def steady(number: Any) -> bool:
    """Is a number rounded as Python's is, whatever its last digits are?"""
    if not number.near:
        return True
    twice = number.tensor * 2
    return _either((twice - twice.round()).abs() > _DIGITS * (twice.abs() + 1), number.exact)


def _either(clear: torch.Tensor, same: torch.Tensor | None) -> bool:
    return read_condition(clear if same is None else clear | same)


def whole(number: _Number) -> Any:
    """`int(number)`. Of a float that is not finite there is none."""
    if not is_float(number):
        return number if type(number) is Int else known(number.value, number.tensor)
    if not steady(number):
        return int(value_of(number))
    read_condition(number.tensor.isfinite())
    return known(int(_plain(number)), number.tensor.trunc().to(torch.int64))


def fractional(number: _Number) -> Any:
    """`float(number)`."""
    if type(number) is Float:
        return number
    return known(float(_plain(number)), as_type(number.tensor, torch.float64), number)


def _plain(number: Any) -> Any:
    """Its value, of which no read is noted."""
    return number.value


def as_given(number: Any) -> Any:
    """The same, of NumPy's type if it has one."""
    return number.value if number.scalar is None else number.scalar(number.value)


def value_of(number: Any) -> Any:
    """Its value, which the graph is for from now on."""
    if get_tracing_state() is not None:
        for each in number.near or (number,):
            scalar_guards.read(each.tensor)
    return _plain(number)


def read_condition(condition: torch.Tensor) -> bool:
    scalar_guards.read(condition)
    return bool(scalar_guards.untraced_item(condition))


# --- Python's arithmetic ----------------------------------------------------------------------------------------------


def _wide(value: Any, wide: bool) -> Any:
    """An operand: a tensor, float64 if ``wide``, or a plain number."""
    tensor = value.tensor if is_one(value) else value
    return as_type(tensor, torch.float64) if wide and isinstance(tensor, torch.Tensor) else tensor


def _arithmetic(name: str, compute: Callable, of_tensors: Callable, backwards: bool) -> Callable:
    def method(self: Any, other: Any, *rest: Any) -> Any:
        other = of_size(other)
        if is_one(other) and other.scalar is not None:
            return NotImplemented  # that number knows what NumPy makes of both
        if type(other) not in (int, float, bool) and not is_one(other):
            return NotImplemented  # NumPy's numbers ask for what `numpy_functions.py` says
        a, b = (other, self) if backwards else (self, other)
        steps = compute in _STEPS and near((a, b))
        if rest or steps or get_tracing_state() is None or (compute in _DIVISIONS and not differ(b, 0)):
            return compute(*[value_of(x) if is_one(x) else x for x in (a, b)], *rest)
        if is_one(b) and compute in _DIVISIONS:
            read_condition(b.tensor != 0)  # Python raises ZeroDivisionError
        if compute is operator.pow:
            return _raised(a, b, of_tensors)
        value = compute(*[_plain(x) if is_one(x) else x for x in (a, b)])
        wide = isinstance(a, float) or isinstance(b, float) or compute in (operator.truediv, operator.pow)
        return known(value, of_tensors(_wide(a, wide), _wide(b, wide)), a, b)

    method.__name__ = name
    return method


def _raised(a: Any, b: Any, of_tensors: Callable) -> Any:
    """``a ** b``. Where Python raises an error, or has a number that the graph has not, the values are read."""
    x, y = (_plain(each) if is_one(each) else each for each in (a, b))
    if is_one(b) and not isinstance(x, float) and not isinstance(y, float):
        read_condition(b.tensor >= 0)  # whether it is a whole number
    try:
        value = x**y
    except ArithmeticError:
        value = math.inf
    most = _EXACT if type(value) is int else math.inf
    if isinstance(value, complex) or not abs(value) < most:
        return operator.pow(*(value_of(each) if is_one(each) else each for each in (a, b)))
    tensor = of_tensors(_wide(a, True), _wide(b, True))
    read_condition(tensor.abs() < most)
    number = known(value, tensor, a, b)
    return marked(number, (a, b)) if is_float(number) else number


BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (operator.add, operator.add),
    "sub": (operator.sub, operator.sub),
    "mul": (operator.mul, operator.mul),
    "truediv": (operator.truediv, torch.true_divide),
    "floordiv": (operator.floordiv, torch.floor_divide),
    "mod": (operator.mod, torch.remainder),
    "pow": (operator.pow, torch.pow),
}
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)
_STEPS = (operator.floordiv, operator.mod)  # a last digit may decide much
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")


def filled_like(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """A plain number as a tensor. (Without a type the exporter writes one of float32.)"""
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)


def tensor_first(function: Callable) -> Callable:
    """`function`, whose first operand may be a plain number."""

    def call(a: Any, b: Any) -> torch.Tensor:
        return function(a if isinstance(a, torch.Tensor) else filled_like(b, a), b)

    return call


def _comparison(name: str) -> Callable:
    compute = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        other = of_size(other)
        if is_one(other) and other.scalar is not None:
            return NotImplemented
        other = other.item() if isinstance(other, numpy.number) else other
        if type(other) not in (int, float, bool) and not is_one(other):
            return NotImplemented
        if get_tracing_state() is None:
            return compute(_plain(self), other)
        if self.between is not None and type(other) in (int, float):
            ends, inside = {compute(end, other) for end in self.between}, self.between[0] <= other <= self.between[1]
            if len(ends) == 1 and not (inside and name in ("eq", "ne")):
                return ends.pop()
        if not differ(self, other):
            return compute(value_of(self), value_of(other) if is_one(other) else other)
        return read_condition(compute(_wide(self, True), _wide(other, True)))

    return method


def _unary(name: str) -> Callable:
    compute = getattr(operator, name)
    return lambda self: known(compute(_plain(self)), compute(self.tensor), self)


def _reading(kind: type, name: str) -> Callable:
    original = getattr(kind, name)
    return lambda self, *args: original(value_of(self), *args)


def _converting(kind: type, name: str) -> Callable:
    """What `int(number)` asks, unless another trace sees the call."""
    original = getattr(kind, name)

    def method(self: Any) -> Any:
        if get_tracing_state() is not None:
            scalar_guards.converts(1)
        return original(value_of(self))

    return method


def _quotient_and_rest(a: Any, b: Any) -> tuple[Any, Any]:
    return a // b, a % b


def _rounding_whole(read: Callable) -> Callable:
    """Of a whole number, which is what it is rounded to, but for tens and hundreds (``round(n, -1)``)."""
    return lambda self, digits=None: self if digits is None or digits >= 0 else read(self, digits)


def _rounding(name: str, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """A float's next integer; an int is its own."""
    original = getattr(float, name)

    def method(self: Any, *digits: Any) -> Any:
        if (digits and digits[0] is not None) or not steady(self):
            return original(value_of(self), *digits)
        read_condition(self.tensor.isfinite())
        return known(original(_plain(self)), of_tensor(self.tensor).to(torch.int64))

    return method


for _kind in (Float, Int):
    _plain_kind = float if _kind is Float else int
    for _name, (_compute, _of_tensors) in BINARY.items():
        setattr(_kind, f"__{_name}__", _arithmetic(_name, _compute, tensor_first(_of_tensors), False))
        setattr(_kind, f"__i{_name}__", getattr(_kind, f"__{_name}__"))  # a tensor's would change the tensor
        setattr(_kind, f"__r{_name}__", _arithmetic(_name, _compute, tensor_first(_of_tensors), True))
    for _name in COMPARED:
        setattr(_kind, f"__{_name}__", _comparison(_name))
    for _name in ("neg", "pos", "abs"):
        setattr(_kind, f"__{_name}__", _unary(_name))
    for _name in ("__index__", "__trunc__", "__floor__", "__ceil__", "__round__", "__repr__", "__str__", "__format__",
                  "__complex__", "is_integer", "as_integer_ratio",
                  "hex", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__invert__",
                  "bit_length"):  # fmt: skip
        if hasattr(_plain_kind, _name):
            setattr(_kind, _name, _reading(_plain_kind, _name))
    for _name in ("__int__", "__float__"):
        setattr(_kind, _name, _converting(_plain_kind, _name))
    for _name, _divided in (("__divmod__", _quotient_and_rest), ("__rdivmod__", lambda b, a: _quotient_and_rest(a, b))):
        setattr(_kind, _name, _divided)
for _name, _of_tensor in (
    ("__trunc__", torch.trunc), ("__floor__", torch.floor), ("__ceil__", torch.ceil), ("__round__", torch.round),
):  # fmt: skip
    setattr(Float, _name, _rounding(_name, _of_tensor))
for _name in ("__trunc__", "__floor__", "__ceil__", "__round__"):
    setattr(Int, _name, _rounding_whole(getattr(Int, _name)))


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
_WITH_FACTOR = _functions("add add_ sub sub_")
_COMPARING = _functions("lt le gt ge eq ne __lt__ __le__ __gt__ __ge__ __eq__ __ne__")
#: They make a tensor of numbers, the last argument.
_MAKING = frozenset((torch.tensor, torch.as_tensor, torch.Tensor.new_tensor))
_FULL = frozenset((torch.full, torch.full_like, torch.Tensor.new_full, torch.Tensor.fill_))
_INDEXING = frozenset((torch.Tensor.__getitem__, torch.Tensor.__setitem__))
_SPLITTING = _functions("split split_with_sizes")
_SPACED = (torch.linspace, torch.logspace)
_UNFLATTENING = _functions("unflatten")
_RESHAPING = _UNFLATTENING | _functions("reshape view")
NARROWING = frozenset((torch.narrow, torch.Tensor.narrow))
#: Beside sizes they take tensors for numbers.
_TAKING_NUMBERS = _functions("where masked_fill masked_fill_ clamp clamp_ clip clip_ lerp lerp_")


def is_among(args: Sequence[Any]) -> bool:
    """Is one of these a number that knows a tensor, or has such a one in a list or a slice?"""
    return any(
        is_among(a) if type(a) in (tuple, list, torch.Size)
        else is_among((a.start, a.stop, a.step)) if type(a) is slice
        else is_one(a)
        for a in args
    )  # fmt: skip


def call(function: Callable, args: tuple, kwargs: dict[str, Any], run: Callable) -> Any:
    """``run(function, args, kwargs)``, with tensors in place of numbers where the function takes such."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and not is_one(a)]
    if function in _PROMOTING and len(args) == 2 and len(tensors) == 1 and not kwargs:
        return _promoting(function, args, tensors[0], run)
    if function in _IN_PLACE and len(args) == 2 and tensors and tensors[0] is args[0] and not kwargs:
        if is_one(size := of_size(args[0])):  # `n += k`, which leaves a number as it was where it is used elsewhere
            return getattr(operator, function.__name__.strip("_"))(size, args[1])
        result = run(_IN_PLACE[function], args, {})
        return run(torch.Tensor.copy_, (args[0], result), {})
    if function in _COMPARING and len(args) == 2 and len(tensors) == 1 and not kwargs:
        dtype = _type_beside(tensors[0], args)
        operands = tuple(as_type(a.tensor if is_one(a) else a, dtype) for a in args)
        return run(function, operands, {})
    if function in NARROWING and (bounds := narrowing(args, kwargs)) is not None:
        return narrowed((*map(_sizes, bounds),), run)
    if function in _SPLITTING and len(args) > 1 and type(args[1]) in (list, tuple):
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        sizes = _sizes(args[1])
        read_condition(sum(sizes) == args[0].size(dim))  # torch raises an error else
        read_condition(torch.stack([each for each in sizes if isinstance(each, torch.Tensor)]).min() >= 0)
    if function in _WITH_FACTOR and len(args) == 2 and kwargs.keys() == {"alpha"}:
        factor, other = kwargs["alpha"], args[1]
        if is_one(factor) and tensors and tensors[-1] is other and (other.is_floating_point() or not is_float(factor)):
            return run(function, (args[0], _promoting(torch.mul, (other, factor), other, run)), {})
    if function in _RESHAPING:  # a graph takes -1 for any size, and of some of these 0 for the size that there is
        least = int(function in _UNFLATTENING)
        _check(_least([*args[1:], *kwargs.values()]) >= least, "a size that data decides is not positive")
    if function is torch.arange:
        bounds = conditions_of_range(*map(_sizes, args), **{k: _sizes(v) for k, v in kwargs.items()})
        for condition in filter(torch.is_tensor, bounds):
            _check(condition, "arange() ends before it begins")
    if function in _SPACED and is_one(steps := args[2] if len(args) > 2 else kwargs["steps"]):
        _check(steps.tensor >= 0, f"{function.__name__}() has fewer than no steps")
    if function in _INDEXING and len(args) > 1:
        args = (args[0], _index(args[1], run), *args[2:])
    if function in _MAKING and not is_among((*kwargs.values(),)):
        return _tensor_of(function, args, kwargs, run)
    value: Any = args[-1] if args else None
    if function in _FULL and is_one(value):
        zero = 0.0 if is_float(value) else 0
        return run(torch.Tensor.copy_, (run(function, (*args[:-1], zero), kwargs), value.tensor), {})
    if function is F.one_hot and len(args) == 2 and not kwargs:
        sizes = (*args[0].shape, args[1].tensor)
        zeros = run(torch.zeros, (sizes,), {"dtype": torch.int64, "device": args[0].device})
        return run(torch.Tensor.scatter, (zeros, -1, args[0].unsqueeze(-1), 1), {})
    python = type(function).__name__ == "function"  # it may be that Python code takes a tensor
    convert = _beside((*args, *kwargs.values())) if python or function in _TAKING_NUMBERS else _sizes
    return run(function, tuple(map(convert, args)), {name: convert(a) for name, a in kwargs.items()})


def _least(sizes: Sequence[Any]) -> torch.Tensor:
    """The least of those in nested lists that are numbers of a trace."""
    found = [_least(s) if isinstance(s, (tuple, list)) else s.tensor for s in sizes if is_among((s,))]
    return torch.stack(found).min()


def _check(holds: torch.Tensor, otherwise: str) -> None:
    """PyTorch refuses what does not hold."""
    if not read_condition(holds):
        raise NotTraceable(otherwise)


def narrowing(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """(tensor, dim, start, length) of a call of `narrow`, or None for one that PyTorch refuses."""
    names = ("input", "dim", "start", "length")[len(args) :]
    return (*args, *(kwargs[name] for name in names)) if set(names) == kwargs.keys() else None


def narrowed(bounds: tuple[Any, ...], run: Callable) -> torch.Tensor:
    """`narrow` as a slice, a view as well. Raises NotTraceable for bounds that a slice would cut or count otherwise."""
    x, dim, start, length = bounds
    end, size = start + length, x.size(dim)
    if not read_condition((torch.as_tensor(start) >= 0) & (torch.as_tensor(length) >= 0) & (end <= size)):
        raise NotTraceable("narrow() counts from the end, or leaves the tensor, and data says where")
    index = [slice(None)] * (dim % x.dim()) + [slice(start, end)]
    return run(torch.Tensor.__getitem__, (x, tuple(index)), {})


def _inside(argument: Any, convert: Callable[[Any], Any]) -> Any:
    """With the items of lists and slices converted."""
    if type(argument) in (tuple, list, torch.Size):
        return (list if type(argument) is list else tuple)(convert(each) for each in argument)
    if type(argument) is slice:
        return slice(*(convert(each) for each in (argument.start, argument.stop, argument.step)))
    return argument


def _beside(arguments: Iterable[Any]) -> Callable[[Any], Any]:
    """A function that gives the tensor of a number, with as many digits as the tensors among ``arguments``, or of the
    type that a tensor of Python's would have; other arguments as they are."""
    wide = any(isinstance(a, torch.Tensor) and not is_one(a) and a.dtype == torch.float64 for a in arguments)
    dtype = torch.float64 if wide else torch.get_default_dtype()

    def converted(argument: Any) -> Any:
        if is_float(argument):
            return as_type(argument.tensor, dtype)
        return argument.tensor if is_one(argument) else _inside(argument, converted)

    return converted


def _sizes(argument: Any) -> Any:
    """The tensors of integers, which torch takes for sizes, bounds and indices; the values of others."""
    if is_one(argument):
        return value_of(argument) if is_float(argument) else argument.tensor
    return _inside(argument, _sizes)


def _tensor_of(function: Callable, args: tuple, kwargs: dict[str, Any], run: Callable) -> torch.Tensor:
    """`torch.tensor(number)`, or of lists of numbers."""
    numbers: list[Any] = []

    def sizes_of(value: Any) -> list[int]:
        if type(value) not in (list, tuple):
            numbers.append(value)
            return []
        inside = [sizes_of(each) for each in value]
        return [len(value), *(inside[0] if inside else [])]

    *given, value = args
    sizes = sizes_of(value)
    made = run(function, (*given, [as_given(n) if is_one(n) else n for n in numbers]), kwargs)
    wide = torch.float64 if made.is_floating_point() else torch.int64
    listed = [n.tensor if is_one(n) else torch.tensor(n) for n in numbers]
    return torch.stack([as_type(each, wide) for each in listed]).to(made.dtype).to(made.device).reshape(sizes)


def _index(index: Any, run: Callable) -> Any:
    """An index with tensors in place of lists of numbers."""
    if type(index) is tuple:
        return tuple(_index(each, run) for each in index)
    if type(index) is slice and is_one(index.step):
        _check(index.step.tensor > 0, "the step of a slice is not positive")
    if type(index) is list and is_among(index):
        return _tensor_of(torch.tensor, (index,), {}, run)
    return index


def _type_beside(tensor: torch.Tensor, args: tuple) -> torch.dtype:
    return torch.result_type(tensor, 1.5 if any(map(is_float, args)) else 1)


def _promoting(function: Callable, args: tuple, tensor: torch.Tensor, run: Callable) -> Any:
    """A number beside a tensor has the tensor's type, or the default one; of 16 bits it is float32 meanwhile."""
    dtype = _type_beside(tensor, args)
    if function in _DIVIDING and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    between = torch.float32 if dtype in _NARROW else dtype
    operands = tuple(as_type(a.tensor if is_one(a) else a, between) for a in args)
    result = run(function, operands, {})
    return result.to(dtype) if between is not dtype else result


class _Kind:
    """How such a number is written among tokens; in a result as one that is computed from sizes, like a tensor."""

    container = False

    @staticmethod
    def write(writer: Any, value: Any, cls: type) -> None:
        writer.tokens += (
            (pytree_tokens.TENSOR,) if writer.results else (pytree_tokens.NUMBER, float if cls is Float else int)
        )
        writer.tensors.append(value.tensor)


pytree.register(Float, _Kind)
pytree.register(Int, _Kind)
