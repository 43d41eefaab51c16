"""Flattens Python values to a list of tensors and a hashable structure, and builds them from these.

Arguments and results of a module are nested Python values. :func:`flatten` takes the tensors out and describes the
rest as tokens in prefix order; the tokens are hashable, so they are part of the key that finds a captured graph, and
:meth:`Structure.rebuild` puts tensors back into fresh containers of the same types.

Arguments may hold tensors, plain constants, and containers that this file can rebuild exactly: lists, dictionaries,
objects that are nothing but their attributes. Anything else (a tensor subclass, a file) raises
:class:`Unflattenable`. Results may also hold arbitrary objects: one with tensors inside is rebuilt from its attributes,
the rest is returned as it is.

A tensor that is there twice among arguments is listed once: it is one tensor to who rebuilds them, too.

Containers are numbered in prefix order (:func:`containers`). So what a call has put into copies of the caller's
(:func:`flatten_filled`) can be put into these themselves (``into`` of :meth:`Structure.rebuild`): a key-value cache.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy
import torch

from ortmodule.core.errors import Unflattenable
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.core.structures import attributes, dtensor_results, leaves, numpy_values, sequences, sparse_arguments
from ortmodule.core.structures.classes import is_made_by_statement
from ortmodule.core.structures.made_alike import MadeAlike, is_found, token_of
from ortmodule.core.structures.tokens import (
    ARRAY,
    AS,
    EMPTY,
    GENERATOR,
    HELD,
    NUMBER,
    PARAMETER,
    SAME,
    SPARSE,
    SPLIT,
    TENSOR,
    TWIN,
    WHOLE,
)
from ortmodule.core.torch_private import of_process_groups, registered_nodes

MOST_DEPTH = 64  # of nested containers
_FLOATS = frozenset((float, *numpy_values.FLOATS))
_REALS = _FLOATS | {int, *numpy_values.INTEGERS}
_NUMBERS = _REALS | {complex}


class Identity:
    """Stands for some tokens in keys: the same object as long as one is alive, which costs nothing to compare."""

    __slots__ = ("__weakref__",)


_identities: WeakValueDictionary[tuple, Identity] = WeakValueDictionary()


class Structure:
    """What was around the tensors. Equal structures rebuild equal values."""

    __slots__ = ("tokens", "objects", "identity")

    def __init__(self, tokens: tuple, objects: tuple = ()) -> None:
        self.tokens, self.objects = tokens, objects
        self.identity = _identities.setdefault(tokens, Identity())  # TypeError for what cannot be hashed

    def __hash__(self) -> int:
        return hash(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self.tokens == other.tokens

    def __repr__(self) -> str:
        return f"Structure{self.tokens}"

    def without_numbers(self) -> tuple:
        """The tokens, the same for structures that differ in the values of numbers only."""
        tokens = list(self.tokens)
        for i, token in enumerate(tokens[:-1]):
            if token in _NUMBERS:
                tokens[i + 1] = None
        return tuple(tokens)

    def numbers(self) -> dict[int, float | int]:
        """The numbers in it, Python's and NumPy's, by the positions of their values among the tokens; keys of
        dictionaries aside."""
        found: dict[int, float | int] = {}
        for i, (before, token) in enumerate(zip((None, *self.tokens), self.tokens, strict=False)):
            if token in _REALS and before not in (type, NUMBER, AS) and i + 1 < len(self.tokens):
                value = self.tokens[i + 1]
                found[i + 1] = float.fromhex(value) if token in _FLOATS else value
        return found

    def classes(self) -> set[type]:
        """Those of its dictionaries and objects with attributes."""
        found = {token for token in self.tokens if isinstance(token, type)}
        kinds = {cls: _KINDS.get(cls) or _MADE.get(cls) for cls in found}
        return {cls for cls, kind in kinds.items() if kind in (_Attributes, _Object, _Dict) and cls not in _Dict.plain}

    def empty(self) -> str:
        """The name of the class of an object, an argument, that has no tensor inside; "": there is none."""
        return leaves.name_of(self.tokens[self.tokens.index(EMPTY) + 1]) if EMPTY in self.tokens else ""

    def number_places(self) -> frozenset[int]:
        """Which of the tensors are numbers (:meth:`lifted`)."""
        kinds = [token for token in self.tokens if token is TENSOR or token is NUMBER]
        return frozenset(i for i, kind in enumerate(kinds) if kind is NUMBER)

    def lifted(self, positions: Container[int], tensors: Sequence[Any]) -> tuple[Structure, list[Any]]:
        """The same with tensors in place of the numbers at these positions, as :meth:`numbers` has them; and these
        numbers among ``tensors``, in their places."""
        numbers, tokens, found, given = self.numbers(), list(self.tokens), [], iter(tensors)
        for i, token in enumerate(self.tokens):
            if i in numbers and i in positions:
                tokens[i - 1 : i + 1] = NUMBER, self.tokens[i - 1]
                found.append(numbers[i])
            elif token is TENSOR or token is NUMBER:
                found.append(next(given))
        return Structure(tuple(tokens), self.objects), found

    def with_held(self, places: Sequence[Any]) -> Structure:
        """The same where tensors are those in ``places`` (``get()``), one for each tensor; None: it is another one."""
        tokens: list[Any] = []
        given = iter(places)
        for token in self.tokens:
            place = next(given) if token is TENSOR or token is NUMBER else None
            tokens += (token,) if place is None else (HELD, place)
        return Structure(tuple(tokens), self.objects)

    def rebuild(
        self, tensors: Sequence[Any], number: Callable[[Any, type], Any] = numpy_values.number_of,
        into: Mapping[int, Any] | None = None, generators: Sequence[torch.Generator] | None = None,
        array: Callable[[Any], Any] = numpy_values.array_of,
    ) -> Any:  # fmt: skip
        """The value again, around other tensors. ``number``: what stands for a number, of a type, that is in a tensor;
        ``array``: for an array of NumPy's. ``into``:
        containers that get the contents of those with these numbers, and take their places. ``generators``: those in
        it, in order (:func:`generators`); None: new ones, which draw the same each time."""
        return _Reader(self, tensors, number, into or {}, generators, array).value()

    def outline(self, places: Sequence[Any]) -> Any:
        """The value again with ``places`` where it has tensors, of which nothing is made: no sparse tensor, no
        parameter, no number of NumPy's."""
        return _Outline(self, places, lambda place, kind: place, {}, None, lambda place: place).value()


def as_arguments(sample: Any) -> tuple[tuple, dict[str, Any]]:
    """(arguments, those with names) of a sample: a tuple, a dictionary, or one argument."""
    if isinstance(sample, dict):
        return (), sample
    return (sample, {}) if isinstance(sample, tuple) else ((sample,), {})


def flatten(value: Any, results: bool = False, by_forward: bool = False) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of ``value`` in order (of results one that appears twice is listed twice), and the rest.

    ``results``: arbitrary objects are allowed. ``by_forward``: forward gives it away, and may have made its class.
    """
    writer = _Writer(results)
    writer.makes = results or by_forward
    writer.add(value)
    try:
        return writer.tensors, Structure(tuple(writer.tokens), tuple(writer.objects))
    except TypeError as error:  # a constant that cannot be hashed
        raise Unflattenable(f"a value that cannot be compared: {error}") from None


def containers(arguments: Any) -> list[Any]:
    """The containers in arguments, by their numbers; tuples are among them."""
    writer = _Writer(False)
    writer.add(arguments)
    return writer.containers


def generators(arguments: Any) -> list[torch.Generator]:
    """The generators in arguments, in order; one that is there twice is listed twice."""
    writer = _Writer(False)
    writer.add(arguments)
    return writer.generators


def flatten_filled(value: Any, held: Sequence[Any]) -> tuple[list[torch.Tensor], Structure, dict[int, int]]:
    """As :func:`flatten` of results, which hold arguments whose containers were ``held`` before something may have
    changed what is in them. Also returns their numbers among ``held``, by those they have in ``value``.

    Raises Unflattenable.
    """
    writer = _Writer(True)
    writer.held = {id(each): number for number, each in enumerate(held)}
    writer.add(value)
    numbers = {n: writer.held[id(each)] for n, each in enumerate(writer.containers) if id(each) in writer.held}
    return writer.tensors, Structure(tuple(writer.tokens), tuple(writer.objects)), numbers


class _Writer:
    __slots__ = (
        "tensors", "tokens", "objects", "results", "open", "met", "containers", "held", "inside", "generators", "twins",
        "repeated", "arrays", "makes",
    )  # fmt: skip

    def __init__(self, results: bool) -> None:
        self.twins: dict[int, int] = {}  # numbers of the tensors of arguments, by their ids
        self.arrays: dict[int, torch.Tensor] = {}  # those of NumPy's arrays, by the arrays' ids
        self.repeated = 0  # how many of them were met before
        self.generators: list[torch.Generator] = []
        self.tensors: list[torch.Tensor] = []
        self.tokens: list[Any] = []
        self.objects: list[Any] = []
        self.results = self.makes = results
        self.open: list[int] = []  # ids of the containers around: a cycle cannot be rebuilt
        self.containers: list[Any] = []  # by their numbers
        self.met: dict[int, int] = {}  # the number of each, by its id; of arguments those that can change
        self.held: dict[int, int] = {}  # numbers of arguments' containers, by their ids
        self.inside = 0  # how many of the containers around are objects

    def size(self) -> tuple[int, int, int, int, int]:
        """How much is written, for :meth:`cut`."""
        return len(self.tokens), len(self.tensors), len(self.objects), len(self.open), len(self.containers)

    def cut(self, size: tuple[int, int, int, int, int], twins: int = 0) -> None:
        """Takes back what was written since. ``twins``: how many tensors of arguments there were."""
        parts: tuple[list, ...] = (self.tokens, self.tensors, self.objects, self.open, self.containers)
        for part, length in zip(parts, size, strict=True):
            del part[length:]
        self.met = {key: number for key, number in self.met.items() if number < size[-1]}
        self.twins = {key: number for key, number in self.twins.items() if number < twins}

    def is_twin(self, tensor: torch.Tensor) -> bool:
        """Is it a tensor of arguments that was met before? It is written then; otherwise it is the next one."""
        if self.results:
            return False
        if (number := self.twins.setdefault(id(tensor), count := len(self.twins))) == count:
            return False
        self.tokens += (TWIN, number)
        self.repeated += 1
        return True

    def add(self, value: Any) -> None:
        cls = type(value)
        kind = _KINDS.get(cls) or _kind_of_made(cls)
        if kind.container:
            if id(value) in self.met:
                if not self.results and id(value) in self.open:
                    raise _too_deep(cls)
                self.tokens += (SAME, self.met[id(value)])
                return
            if self.results or not issubclass(cls, tuple):
                self.met[id(value)] = len(self.containers)
            self.containers.append(value)
        kind.write(self, value, cls)

    def add_all(self, container: Any, values: Iterable[Any]) -> None:
        if len(self.open) == MOST_DEPTH or id(container) in self.open:
            raise _too_deep(type(container))
        self.open.append(id(container))
        for value in values:
            self.add(value)
        self.open.pop()


class _Reader:
    __slots__ = ("tokens", "tensors", "objects", "met", "number", "into", "generators", "twins", "array", "arrays")

    def __init__(
        self, structure: Structure, tensors: Iterable[Any], number: Callable[[Any, type], Any], into: Mapping[int, Any],
        generators: Sequence[torch.Generator] | None, array: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self.array = array
        self.arrays: dict[int, Any] = {}  # by the ids of their tensors
        self.generators: Iterator[torch.Generator | int] = iter(itertools.count() if generators is None else generators)
        self.tokens, self.tensors, self.number = iter(structure.tokens), iter(tensors), number
        self.into = into
        self.objects = structure.objects
        self.met: list[Any] = []
        self.twins: list[Any] = []  # the tensors, each once

    def _tensor(self, tensor: Any) -> Any:
        self.twins.append(tensor)
        return tensor

    def value(self) -> Any:
        token = next(self.tokens)
        if token is TENSOR:
            return self._tensor(next(self.tensors))
        if token is TWIN:
            return self.twins[next(self.tokens)]
        if token is PARAMETER:
            return self.parameter(self.value())
        if token is HELD:
            return self._tensor(next(self.tokens).get())
        if token is NUMBER:
            return self.number(next(self.tensors), next(self.tokens))
        if token is AS:
            return self.scalar(next(self.tokens), self.value())
        if token is ARRAY:
            tensor = self.value()
            if id(tensor) not in self.arrays:
                self.arrays[id(tensor)] = self.array(tensor)
            return self.arrays[id(tensor)]
        if token is SPARSE:
            sizes, coalesced = next(self.tokens), next(self.tokens)
            return self._tensor(self.sparse(self.value(), self.value(), sizes, coalesced))
        if token is SPLIT:
            return dtensor_results.read(self)
        if token is WHOLE:
            return self.objects[next(self.tokens)]
        if token is SAME:
            return self.met[next(self.tokens)]
        if token is GENERATOR:
            device, generator = next(self.tokens), next(self.generators)
            return torch.Generator(device).manual_seed(generator) if isinstance(generator, int) else generator
        if token is EMPTY:
            token = next(self.tokens)
        token = token.made if type(token) is MadeAlike else token
        kind: Any = _KINDS.get(token) or _kind_of_made(token)
        if not kind.container:
            return kind.read(self, token)
        number = len(self.met)
        self.met.append(None)
        self.met[number] = value = kind.read(self, token, self.into.get(number))
        return value

    def values(self, count: int) -> list[Any]:
        return [self.value() for _ in range(count)]

    def parameter(self, value: Any) -> Any:
        return leaves.as_parameter(value)

    def scalar(self, kind: Callable[[Any], Any], value: Any) -> Any:
        return kind(value)

    def sparse(self, *parts: Any) -> Any:
        return sparse_arguments.made_of(*parts)


class _Outline(_Reader):
    """Reads a value with something else in the places of its tensors."""

    __slots__ = ()

    def parameter(self, value: Any) -> Any:
        return value

    def scalar(self, kind: Callable[[Any], Any], value: Any) -> Any:
        return value

    def sparse(self, indices: Any, values: Any, sizes: Any, coalesced: bool) -> Any:
        return {"indices": indices, "values": values}


# --- the kinds of values: how one is written as tokens, and read again ------------------------------------------------


def holds_objects(structure: Structure) -> bool:
    """Is something in it an object with attributes, of which another one is made, and not a list or a dictionary?"""
    classes = (_KINDS.get(token) for token in structure.tokens if isinstance(token, type))
    return any(isinstance(kind, type) and issubclass(kind, _Attributes) for kind in classes)


def _new(cls: Any) -> Any:
    """An object of this class that is not initialised."""
    return cls.__new__(cls)


class _Dict(sequences.Container):
    """Dictionaries; subclasses with their attributes (a ModelOutput keeps its fields as items and as attributes)."""

    plain = (dict, OrderedDict, defaultdict)

    @classmethod
    def write(self, writer: _Writer, value: dict, cls: type) -> None:
        keys = tuple(value)
        writer.tokens += (token_of(cls) if writer.makes else cls, keys, tuple(map(type, keys)))
        writer.add_all(value, (value[key] for key in keys))
        if isinstance(value, defaultdict):
            writer.add(value.default_factory)
        if cls not in self.plain:
            attributes.write(writer, value)

    @classmethod
    def read(self, reader: _Reader, cls: type, target: Any) -> dict:
        value, keys = _new(cls) if target is None else target, next(reader.tokens)
        next(reader.tokens)
        base: type[dict] = OrderedDict if issubclass(cls, OrderedDict) else dict
        items = reader.values(len(keys))
        if target is not None:
            base.clear(value)
        for key, item in zip(keys, items, strict=True):
            base.__setitem__(value, key, item)
        if issubclass(cls, defaultdict):
            value.default_factory = reader.value()
        return value if cls in self.plain else attributes.read(reader, value)


class _Attributes(sequences.Container):
    """Dataclasses and other plain objects, attribute by attribute."""

    @classmethod
    def write(self, writer: _Writer, value: Any, cls: type) -> None:
        writer.tokens.append(token_of(cls) if writer.makes else cls)
        attributes.write(writer, value)

    @classmethod
    def read(self, reader: _Reader, cls: type, target: Any) -> Any:
        return attributes.read(reader, _new(cls) if target is None else target)


class _Object(_Attributes):
    """An object with attributes: in results a fresh one if tensors are inside (a key-value cache), else itself. Among
    arguments one that is nothing but its attributes: a batch, a cache. What one without tensors is to forward is not to
    be seen, as it may be compared, or called: it is ``EMPTY``, and forward has to put tensors into it."""

    @classmethod
    def write(self, writer: _Writer, value: Any, cls: type) -> None:
        if writer.results and id(value) not in writer.held:
            return self._write_result(writer, value, cls)
        if not writer.results and not _is_plain(cls):
            return leaves.WholeLeaf.write(writer, value, cls)
        count, begin, outermost = len(writer.tensors) + writer.repeated, len(writer.tokens), not writer.inside
        writer.inside += 1
        try:
            super().write(writer, value, cls)
        except Unflattenable:
            if len(writer.tensors) + writer.repeated > count or writer.results:
                raise
            return leaves.WholeLeaf.write(writer, value, cls)
        finally:
            writer.inside -= 1
        if len(writer.tensors) + writer.repeated == count and outermost and not writer.results:
            writer.tokens.insert(begin, EMPTY)
        return None

    @classmethod
    def _write_result(self, writer: _Writer, value: Any, cls: type) -> None:
        before = writer.size()
        try:
            super().write(writer, value, cls)
        except Unflattenable:
            del writer.tensors[before[1] :]
        if len(writer.tensors) == before[1]:
            tokens, tensors, objects, opened, count = before
            writer.cut((tokens, tensors, objects, opened, count - 1))  # it is no container itself
            leaves.WholeLeaf.write(writer, value, cls)


def _is_plain(cls: type) -> bool:
    """Is it made by class statements, all that it is derived from, too?"""
    return all(map(is_made_by_statement, cls.__mro__[:-1]))


# Types of values that cannot change. A type that is not here is looked at once, by _kind_of.
CONSTANTS = (
    type(None),
    type(Ellipsis),
    int,
    float,
    complex,
    str,
    bytes,
    range,
    frozenset,
    type,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    numpy.generic,
    *of_process_groups,
)
_KINDS: dict[Any, Any] = {
    float: leaves.FloatLeaf,
    torch.Tensor: leaves.TensorLeaf,
    torch.nn.Parameter: leaves.ParameterLeaf,
    Deferred: leaves.DeferredLeaf,
    slice: sequences.Slice,
}
_KINDS |= {numpy.ndarray: numpy_values.ArrayLeaf} | dict.fromkeys(numpy_values.FLOATS, numpy_values.NumpyFloatLeaf)
_KINDS |= dict.fromkeys(numpy_values.INTEGERS, numpy_values.NumpyIntegerLeaf)
_KINDS |= {leaves.PrivateLeaf: leaves.PrivateLeaf, leaves.Unseen: leaves.Unseen, torch.Generator: leaves.GeneratorLeaf}
#: The same of classes that functions make, in each call, it may be: they are not kept alive.
_MADE: WeakKeyDictionary[type, Any] = WeakKeyDictionary()
# Not rebuilt from their attributes although they have some.
_MACHINERY = (torch.nn.Module, types.ModuleType, types.MethodType)


def register(cls: type, kind: Any) -> None:
    """Values of class ``cls`` are written by ``kind.write(writer, value, cls)``; a container if ``kind.container``."""
    _KINDS[cls] = kind


def _kind_of(cls: type) -> Any:
    if issubclass(cls, torch.Tensor):
        return leaves.TensorLeaf if cls is torch.nn.Buffer else leaves.SubclassLeaf
    if issubclass(cls, (type, types.FunctionType)):
        return leaves.CodeLeaf
    if issubclass(cls, CONSTANTS):
        return leaves.ConstantLeaf
    if issubclass(cls, dict):
        return _Dict
    if issubclass(cls, (list, tuple, deque)):
        return sequences.Deque if issubclass(cls, deque) else sequences.Sequence
    if cls is types.SimpleNamespace:
        return _Attributes
    if cls in registered_nodes and not _is_plain(cls):
        return sequences.Registered
    if not attributes.are_all(cls) or issubclass(cls, _MACHINERY) or cls.__new__ is not object.__new__:
        return leaves.WholeLeaf
    return _Attributes if dataclasses.is_dataclass(cls) else _Object


def _kind_of_made(cls: type) -> Any:
    """Of a class that is not among those which are kept."""
    if (kind := _MADE.get(cls)) is None:
        kind = _kind_of(cls)
        kinds: Any = _KINDS if not is_made_by_statement(cls) or is_found(cls) else _MADE
        kinds[cls] = kind
    return kind


def _too_deep(cls: type) -> Unflattenable:
    return Unflattenable(f"a {leaves.name_of(cls)} that contains itself, or too many others")
