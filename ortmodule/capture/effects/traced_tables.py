"""Stands in place of dictionaries that forward fills under sizes while a module is traced.

`guards/reads/size_tables.py` finds them.

A size is a tensor in a trace, and no key of the dictionary. So another dictionary takes its place, which compares the
formula of a key with that of the table: that they agree is a read, which runs compare. Where forward does anything else
with the dictionary, what it holds are no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ortmodule.capture import scalar_guards
from ortmodule.capture.effects.filled_caches import filling, follows_from
from ortmodule.core.errors import FillsCache, NotTraceable, Unflattenable
from ortmodule.core.objects.tensor_memory import version_of
from ortmodule.core.pytree import flatten
from ortmodule.core.size_expr import formula_of, is_number
from ortmodule.core.torch_private import get_value_trace
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.reads.size_tables import TABLES, DictAttribute, Key, SizeTable, TableKey, formulas_in, key_parts

_MISSING = object()


class TracedTables:
    """Those of one trace."""

    def __init__(self, tree: Tree, tensors: Sequence[torch.Tensor]) -> None:
        """``tensors``: of the call, traced."""
        self.tree, self.tensors = tree, tensors
        self.shapes = [tuple(get_value_trace(t).type().sizes()) for t in tensors]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, they stand in place of the dictionaries. Raises as :meth:`refuse` does."""
        found: dict[int, _Table] = {}
        for table in self.tree.tables:
            held = None if table.refused else table.held()
            if held is not None:
                found.setdefault(id(held), _Table(self, table.attribute, held)).add(table)
        try:
            for each in found.values():
                each.attribute.set(each)
            yield
            for each in found.values():
                each.check()
        finally:
            for each in found.values():
                each.attribute.set(each.held)

    def learn(self, attribute: DictAttribute, key: Any, value: Any) -> None:
        """Forward sets ``value`` under a key of the dictionary in ``attribute``. Raises FillsCache where the key
        follows from sizes, and later calls may find it: it does not hang on what is in the call's tensors."""
        call = {get_value_trace(tensor).unique() for tensor in self.tensors}
        try:
            parts = key_parts(key, formula_of)
            tensors, structure = flatten(value)
        except (LookupError, Unflattenable):
            return
        if not tensors or not formulas_in(parts) or not self.tree.may_keep or structure.objects:
            return
        if type(attribute.find()) not in (*TABLES, _Table):
            return
        if any(t.requires_grad or is_number(t) or follows_from(get_value_trace(t), call) for t in tensors):
            return
        made = SizeTable(attribute, TableKey(parts, self.shapes))
        if not any(made.is_like(table) for table in self.tree.tables):
            raise FillsCache(filling([made.attribute.name]), tables=[made])

    def refuse(self, tables: list[SizeTable], what: str) -> NoReturn:
        """Raises FillsCache, which leaves this call to PyTorch; from now on they are no tables. Or NotTraceable."""
        if not self.tree.may_keep:
            raise NotTraceable(what)
        raise FillsCache(what, refused=tables)


def _whole(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(table: _Table, *args: Any, **kwargs: Any) -> Any:
        if scalar_guards.active() is not None:
            table.refuse(f"{scalar_guards.user_line()} looks at all of a dictionary with tables for sizes ({name})")
        return original(table, *args, **kwargs)

    return method


class _Table(dict[Any, Any]):
    """In place of one dictionary, whose items it has for code that is not traced."""

    def __init__(self, owner: TracedTables, attribute: DictAttribute, held: dict[Any, Any]) -> None:
        super().__init__(held)
        self.attribute, self.held, self._owner = attribute, held, owner
        self._tables: list[SizeTable] = []
        self._values: list[Any] = []  # of these tables, None where there is nothing
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._missed = False

    def add(self, table: SizeTable) -> None:
        self._tables.append(table)
        self._values.append(table.value())
        self._versions += [(t, version_of(t)) for t in table.tensors()]

    def check(self) -> None:
        """Raises where forward has found nothing under a key, and goes on without: the next call may find something;
        where it writes into a table; and where it puts another dictionary in the place of this one."""
        if self.attribute.find() is not self:
            self.refuse(f"forward sets the attribute {self.attribute.name}, which holds tables for sizes")
        if self._missed:
            self.refuse("forward looks for a table in a dictionary, and goes on without it")
        if any(version_of(tensor) != version for tensor, version in self._versions):
            self.refuse("forward writes into a table that a dictionary holds")

    def refuse(self, what: str) -> NoReturn:
        self._owner.refuse(self._tables, what)

    def _find(self, key: Any) -> Any:
        recorder = scalar_guards.active()
        if recorder is None:
            return dict.get(self, key, _MISSING)
        with recorder.paused():
            try:
                parts = key_parts(key, formula_of)
            except LookupError:
                parts = None
            if parts is None or not formulas_in(parts):
                self.refuse(f"{scalar_guards.user_line()} looks for another key among tables for sizes")
            for table, value in zip(self._tables, self._values, strict=True):
                if value is not None and Key(parts).traced() == table.place.key.of(self._owner.shapes):
                    for ours, theirs in _pairs(key, parts, table.place.key.at(self._sizes(table))):
                        recorder.read(ours == theirs)
                    return value
        self._missed = True
        return _MISSING

    def _sizes(self, table: SizeTable) -> list[Any]:
        tensors = self._owner.tensors
        return [dim if isinstance(dim, int) else tensors[dim[0]].size(dim[1]) for dim in table.place.key.dims]

    def __contains__(self, key: Any) -> bool:
        return self._find(key) is not _MISSING

    def __getitem__(self, key: Any) -> Any:
        if (found := self._find(key)) is _MISSING:
            raise KeyError(key)
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        found = self._find(key)
        return default if found is _MISSING else found

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if (found := self._find(key)) is _MISSING:
            self[key] = default
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        recorder = scalar_guards.active()
        if recorder is None:
            dict.__setitem__(self, key, value)
            return
        with recorder.paused():
            self._owner.learn(self.attribute, key, value)
        self.refuse(f"{scalar_guards.user_line()} sets a table for sizes again")

    for _name in (
        "__iter__", "__len__", "__delitem__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__reversed__",
        "__reduce_ex__", "keys", "values", "items", "pop", "popitem", "clear", "update", "copy",
    ):  # fmt: skip
        locals()[_name] = _whole(_name)
    __hash__ = None  # dictionaries have none

    def __getattr__(self, name: str) -> Any:
        """What other dictionaries have: `move_to_end`, `default_factory`."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.refuse(f"{scalar_guards.user_line()} uses {name} of a dictionary with tables for sizes")


def _pairs(key: Any, parts: Any, value: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The traced numbers in ``key``, each with what stands for it in ``value``."""
    if isinstance(key, tuple):
        for each, part, other in zip(key, parts, value, strict=True):
            yield from _pairs(each, part, other)
    elif isinstance(key, torch.Tensor):
        yield key, value
