"""Finds what forward keeps for sizes of its inputs: `self.masks[x.shape[1]]`, and numbers beside tables.

Such a key is a formula of sizes (:class:`Key`), so the dictionary is looked up for each call, and the tensors that are
there are inputs of the graph, behind the caller's own (`Inventory.resized`).
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ortmodule.core import pytree
from ortmodule.core.errors import Unflattenable
from ortmodule.core.pytree import CONSTANTS
from ortmodule.core.size_expr import SizeFormula


class DictAttribute(Protocol):
    """An attribute (`inventory.Slot`)."""

    @property
    def name(self) -> str: ...
    @property
    def holder(self) -> Any: ...
    @property
    def key(self) -> Any: ...
    def find(self) -> Any: ...
    def set(self, value: Any, /) -> None: ...


TABLES = (dict, OrderedDict, defaultdict)
MOST_CHOICES = 64  # of dimensions that the sizes in a key may be those of
MOST_SHAPES = 4096  # of which the key is remembered

Dim = tuple[int, int]  # (tensor, dimension)
Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Key:
    """A key: a formula of sizes, a constant, or a tuple of these. ``dims``: what the sizes in each formula are those
    of, in their order; a number: always this."""

    parts: Any
    dims: tuple[Dim | int, ...] = ()

    def at(self, sizes: Iterable[Any]) -> Any:
        """``sizes``: one for each of ``dims``."""
        return _at(self.parts, iter(sizes))

    def at_lengths(self, lengths: Mapping[Dim, int]) -> Any:
        """``lengths``: of dimensions."""
        return self.at([dim if isinstance(dim, int) else lengths[dim] for dim in self.dims])

    def traced(self) -> Any:
        """For the sizes of the trace that has met it."""
        return self.at(size for formula in formulas_in(self.parts) for size in formula.sizes)

    def of(self, shapes: Shapes) -> Any:
        return self.at([dim if isinstance(dim, int) else shapes[dim[0]][dim[1]] for dim in self.dims])

    def is_like(self, other: Key) -> bool:
        return _without_sizes(self.parts) == _without_sizes(other.parts)


def _at(part: Any, sizes: Any) -> Any:
    if type(part) is tuple:
        return tuple(_at(each, sizes) for each in part)
    if isinstance(part, SizeFormula):
        return part.at(list(itertools.islice(sizes, len(part.sizes))))
    return part


def _without_sizes(part: Any) -> Any:
    if type(part) is tuple:
        return tuple(map(_without_sizes, part))
    return part.steps if isinstance(part, SizeFormula) else (type(part), part)


def formulas_in(part: Any) -> list[SizeFormula]:
    """Those of a key, in their order."""
    if type(part) is tuple:
        return [formula for each in part for formula in formulas_in(each)]
    return [part] if isinstance(part, SizeFormula) else []


class TableKey:
    """Under which key a table is, for each call: the dimensions that the sizes in it are those of are settled by the
    dictionary that the first call has filled."""

    def __init__(self, parts: Any, traced: Shapes) -> None:
        """``parts``: of the key, as met in a trace at the sizes ``traced``."""
        self.key = Key(parts)
        self._choices: list[tuple[Dim | int, ...]] | None = _possible(parts, traced)
        self._filled: Shapes = ()  # the call that is to fill it
        self._found: dict[tuple, Any] = {}

    def fill(self, shapes: Shapes) -> None:
        """PyTorch is about to run the first call that puts something under the key."""
        self._filled = shapes

    def settle(self, held: dict[Any, Any]) -> bool:
        """False: what that call has put into the dictionary is under no such key."""
        choices = self._choices
        if choices is None:
            return True
        keys = [Key(self.key.parts, dims) for dims in choices]
        fitting = next((key for key in keys if self._fits(key, held)), None)
        if fitting is not None:
            self.key = fitting
        self._choices = None  # behind the key: another thread may ask
        return fitting is not None

    def _fits(self, key: Key, held: dict[Any, Any]) -> bool:
        try:
            return key.of(self._filled) in held
        except (LookupError, TypeError):
            return False

    def of(self, shapes: tuple) -> Any:
        """For a call with tensors of these sizes. Raises LookupError for one with others."""
        found = self._found.get(shapes)
        if found is None:
            if len(self._found) >= MOST_SHAPES:
                self._found.clear()
            found = self._found[shapes] = self.key.of(shapes)
        return found


def _possible(parts: Any, traced: Shapes) -> list[tuple[Dim | int, ...]]:
    """What the sizes in a key may be those of: of each dimension of that size, or none."""
    sizes = [size for formula in formulas_in(parts) for size in formula.sizes]
    dims = [(i, d) for i, shape in enumerate(traced) for d in range(len(shape))]
    each: list[list[Dim | int]] = [[*(dim for dim in dims if traced[dim[0]][dim[1]] == n), n] for n in sizes]
    return list(itertools.islice(itertools.product(*each), MOST_CHOICES))


class SizeNumber:
    """An attribute with a number that forward sets beside a table: a formula of sizes, which tells whether the table is
    that for a call (`if n != self.known: self.known, self.table = n, make(n)`)."""

    def __init__(self, attribute: DictAttribute, formula: SizeFormula | None, traced: Shapes) -> None:
        """``formula``: of what a trace at the sizes ``traced`` has set it to; None: there is none."""
        self.attribute = attribute
        choices = [] if formula is None else _possible(formula, traced)
        self._keys = [Key(formula, dims) for dims in choices if any(isinstance(dim, tuple) for dim in dims)]
        self._filled: Shapes = ()

    def fill(self, shapes: Shapes) -> None:
        """PyTorch is about to run a call with these sizes that sets it."""
        self._filled = shapes

    def key_of(self, number: Any, shapes: Shapes) -> Key | None:
        """How ``number``, which it is now, follows from the sizes of a call; None: it does not."""
        found = [key for key in self._keys if _gives(key, shapes, number)]
        both = [key for key in found if _gives(key, self._filled, number)]
        return next(iter(both or found), None)


def _gives(key: Key, shapes: Shapes, number: Any) -> bool:
    try:
        found = key.of(shapes)
    except LookupError:
        return False
    return type(found) is type(number) and found == number


class SizeTable:
    """What a dictionary holds under one key: the tensors of this thread's latest call, by their numbers
    (`Inventory.resized`)."""

    def __init__(self, attribute: DictAttribute, place: TableKey) -> None:
        """``attribute``: holds the dictionary. ``place``: where in it."""
        self.attribute, self.place = attribute, place
        self.structure: pytree.Structure | None = None  # of what it holds; None: there was nothing yet
        self.count = 0  # of the tensors in it
        self.refused = False
        self._waited: set[Any] = set()  # keys for which PyTorch has run a call
        self._local = threading.local()

    def is_like(self, other: SizeTable) -> bool:
        """Is it for the same key of the same dictionary?"""
        return self.attribute.name == other.attribute.name and self.place.key.is_like(other.place.key)

    def held(self) -> dict[Any, Any] | None:
        """The dictionary of now. Others than Python's own may do more than to look for a key."""
        found = self.attribute.find()
        return found if type(found) in TABLES else None

    def select(self, shapes: tuple) -> bool:
        """Takes the tensors for a call with inputs of these sizes. False: they are not there, and PyTorch has to run
        such a call, which may put them there."""
        self._local.now = None
        held = self.held()
        if self.refused or held is None:
            return True
        self.refused = not self.place.settle(held)
        if self.refused:
            return True
        key = None
        try:
            key = self.place.of(shapes)
            tensors, structure = pytree.flatten(held[key])
        except (LookupError, TypeError, Unflattenable):
            return key is None or self._wait(key)
        if self.structure is None:
            self.structure, self.count = structure, len(tensors)
        plain = all(type(t) is torch.Tensor and not t.requires_grad and t.numel() for t in tensors)
        if structure == self.structure and plain:
            self._local.now = tensors
        return True

    def _wait(self, key: Any) -> bool:
        if key in self._waited:
            return True
        if len(self._waited) >= MOST_SHAPES:
            self._waited.clear()
        self._waited.add(key)
        return False

    def numbers(self) -> range:
        """Of the tensors that it holds when there are any."""
        return range(self.count)

    def get(self, number: int) -> torch.Tensor | None:
        now = getattr(self._local, "now", None)
        return None if now is None else now[number]

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._local.now[number]

    def __setitem__(self, number: int, tensor: torch.Tensor) -> None:
        if getattr(self._local, "now", None) is None:
            self._local.now = [None] * self.count
        self._local.now[number] = tensor

    def tensors(self) -> list[torch.Tensor]:
        """Those of now."""
        return list(getattr(self._local, "now", None) or ())

    def value(self) -> Any:
        """What is in the dictionary for this call, made of the tensors of now; None: nothing."""
        now = getattr(self._local, "now", None)
        return None if now is None or self.structure is None else self.structure.rebuild(list(now))

    def put(self, shapes: Shapes) -> None:
        """Puts the tensors of now into the dictionary, which is isolated, under the key for these sizes."""
        held = self.held()
        if held is not None and (value := self.value()) is not None:
            held[self.place.of(tuple(shapes))] = value


def key_parts(key: Any, formula: Any) -> Any:
    """The parts of a key that a trace has met. ``formula``: gives that of a traced number, or None. Raises LookupError
    for a key that is no formula of sizes."""
    if isinstance(key, tuple):
        return tuple(key_parts(each, formula) for each in key)
    if isinstance(key, torch.Tensor):
        found = formula(key)
        if found is None:
            raise LookupError
        return found
    if isinstance(key, CONSTANTS):
        return key
    raise LookupError
