"""Runs the Python that a scripted function was made of, while a module is traced: branches and loops are understood.

A trace has a call of a scripted function as one operator, and its control flow as it stands in the source. Run in
Python, sizes decide as they do elsewhere in forward, and loops over numbers are written out.

TorchScript is not Python. A function is left as it is (`_python_of`) where it

- was traced (`torch.jit.trace`), or loaded from a file: there is no Python that does the same;
- asks `torch.jit.is_scripting()`, as do functions that it calls, or calls one that was not scripted with it (the name
  may mean another one by now, or the function is one that TorchScript leaves to Python);
- raises a whole number to a power, or rounds one: the result is a fraction there;
- is given, or returns, objects of classes.

What it is given it gets as TorchScript would give it: a whole number as a fraction where it says `float`, and copies of
lists and dictionaries. `n // 2` and `n % 2` of negative numbers, and `n / 2`, are alike in both. What is not, the check
of a graph beside the module finds, which calls the scripted function.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ortmodule.capture.numbers import symbolic_numbers
from ortmodule.capture.scalar_guards import active
from ortmodule.core.errors import NotScripted
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.size_expr import is_number, number_of
from ortmodule.core.torch_private import is_scripted_from, python_of
from ortmodule.guards.code_reader import all_of

_ASKS = "is_scripting"
#: What plain values have, by what TorchScript calls the type.
_PLAIN: dict[str, tuple[type, ...]] = {
    "IntType": (int, torch.dtype, torch.layout, torch.memory_format),
    "FloatType": (float,),
    "BoolType": (bool,),
    "StringType": (str,),
    "NoneType": (type(None),),
    "DeviceObjType": (torch.device,),
    "NumberType": (int, float),
}
#: Operators of numbers of these types that give a fraction, and a whole number in Python.
_FRACTIONS = {"aten::pow": ("IntType",), "aten::round": ("IntType", "FloatType")}
#: What Python raises for code that TorchScript alone understands.
_NOT_PYTHON = (NameError, AttributeError, TypeError, NotImplementedError)
#: Functions of torch's that are Python, and that TorchScript knows by itself.
_TORCHS = ("torch", "math", "typing", "builtins")
_thread = threading.local()
_known: WeakKeyDictionary[Any, types.FunctionType | None] = WeakKeyDictionary()  # by scripted functions


def _python_of(scripted: Any) -> types.FunctionType | None:
    """The Python that does the same as ``scripted``; None: there is none."""
    if scripted not in _known:
        original = python_of(scripted)
        _known[scripted] = original if original is not None and _is_alike(scripted, original) else None
    return _known[scripted]


def _is_alike(scripted: Any, original: types.FunctionType) -> bool:
    if not is_scripted_from(scripted, original) or not all(_takes(each.type) for each in _arguments(scripted)):
        return False
    if not all(_takes(each.type) for each in scripted.schema.returns):
        return False
    graph = scripted.inlined_graph
    for name, kinds in _FRACTIONS.items():
        for node in graph.findAllNodes(name, recurse=True):
            if all(value.type().kind() in kinds for value in node.inputs()):
                return False
    return all(_is_alike_called(function) for function in _called(original))


def _is_alike_called(function: Any) -> bool:
    """``function``: that a scripted one calls."""
    if isinstance(function, torch.jit.ScriptFunction):
        return True  # which is asked when it is called
    return is_scripted_from(None, function) and not any(_ASKS in each.co_names for each in all_of(function.__code__))


def _called(original: types.FunctionType) -> Iterator[Any]:
    """It, and functions that it calls by names of its module and of what is around it, and so on."""
    open_functions: list[Any] = [original]
    met: set[Any] = set()
    while open_functions:
        function = open_functions.pop()
        if function in met:
            continue
        met.add(function)
        yield function
        if isinstance(function, types.FunctionType):
            held = [*_in_cells(function), *_named(function)]
            open_functions += [f for f in held if isinstance(f, (types.FunctionType, torch.jit.ScriptFunction))]


def _in_cells(function: types.FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def _named(function: types.FunctionType) -> Iterable[Any]:
    """The functions that its code names, of its module and of modules there, but for torch's own."""
    variables = function.__globals__
    names = {name for code in all_of(function.__code__) for name in code.co_names}
    found = [variables[name] for name in names if name in variables]
    inside = [vars(m).get(name) for m in found if isinstance(m, types.ModuleType) for name in names]
    for each in (*found, *inside):
        if getattr(each, "__name__", "") == _ASKS or not _is_torchs(each):
            yield each


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] in _TORCHS


def _arguments(scripted: Any) -> list[Any]:
    return scripted.schema.arguments


def _inner(kind: Any) -> list[Any]:
    """The types inside of a type."""
    if kind.kind() in ("OptionalType", "ListType"):
        return [kind.getElementType()]
    if kind.kind() == "TupleType":
        return kind.elements()
    return [kind.getKeyType(), kind.getValueType()] if kind.kind() == "DictType" else []


def _takes(kind: Any) -> bool:
    """Is a value of this type the same in Python?"""
    if kind.kind() == "TupleType" and not kind.annotation_str.startswith("Tuple["):
        return False  # a named one
    inner = _inner(kind)
    return kind.kind() in _PLAIN or kind.kind() == "TensorType" or bool(inner) and all(map(_takes, inner))


def _as(kind: Any, value: Any) -> Any:
    """``value`` as a scripted function gets it. Raises NotScripted."""
    name, inner = kind.kind(), _inner(kind)
    if name == "OptionalType":
        return None if value is None else _as(inner[0], value)
    if name == "TensorType":
        if isinstance(value, torch.Tensor) and not symbolic_numbers.is_one(value):
            return value
    elif name == "ListType" and isinstance(value, (list, tuple)):
        return [_as(inner[0], each) for each in value]
    elif name == "TupleType" and type(value) is tuple and len(value) == len(inner):
        return tuple(_as(each, one) for each, one in zip(inner, value, strict=True))
    elif name == "DictType" and type(value) is dict:
        return {_as(inner[0], key): _as(inner[1], each) for key, each in value.items()}
    elif isinstance(value, torch.Tensor):
        return _traced_number(name, value)
    elif name == "FloatType" and type(value) is int:
        return float(value)
    elif name in _PLAIN and type(value) in _PLAIN[name]:
        return value
    raise NotScripted


def _traced_number(name: str, value: torch.Tensor) -> Any:
    """A number that knows its tensor, or a size. Raises NotScripted."""
    found: Any = None
    if symbolic_numbers.is_one(value):
        found = float if symbolic_numbers.is_float(value) else int
    elif is_number(value):
        found = type(number_of(value))
    if found is None or found is not {"IntType": int, "FloatType": float}.get(name):
        raise NotScripted
    return value


def _given(scripted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Raises NotScripted."""
    kinds = {each.name: each.type for each in _arguments(scripted)}
    if len(args) > len(kinds) or not kwargs.keys() <= kinds.keys():
        raise NotScripted
    found = [_as(kind, value) for kind, value in zip(kinds.values(), args, strict=False)]
    return found, {name: _as(kinds[name], value) for name, value in kwargs.items()}


def _inlined(call: Callable[..., Any]) -> Callable[..., Any]:
    def method(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is None and not getattr(_thread, "everywhere", False):
            return call(scripted, *args, **kwargs)
        with nullcontext() if recorder is None else recorder.paused():
            original = _python_of(scripted)
            try:
                given = None if original is None else _given(scripted, args, kwargs)
            except NotScripted:
                given = None
        if original is None or given is None:
            return call(scripted, *args, **kwargs)
        try:
            return original(*given[0], **given[1])
        except _NOT_PYTHON:
            _known[scripted] = None  # another trace has the call
            raise

    return method


_REPLACEMENTS = [Replacement.around(torch.jit.ScriptFunction, "__call__", _inlined)]


def inlined() -> AbstractContextManager[None]:
    """Inside, traces of this thread have the Python of scripted functions."""
    return replaced(_REPLACEMENTS)


@contextmanager
def as_traced() -> Iterator[None]:
    """Inside, in this thread, what PyTorch runs goes the same way, so that it is of the same operators."""
    _thread.everywhere = True
    try:
        with replaced(_REPLACEMENTS):
            yield
    finally:
        _thread.everywhere = False
