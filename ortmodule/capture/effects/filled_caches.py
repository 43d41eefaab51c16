"""Finds attributes in which forward keeps what it has computed for later calls: masks, tables of positions.

A call that fills such a cache, or makes it larger, is seldom; the calls behind it find it there. So PyTorch runs that
call, and the next one is captured, with the tables as inputs of any size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from ortmodule.capture.numbers import symbolic_numbers
from ortmodule.capture.numbers.read_causes import OPAQUE, RANDOM, causes, causes_of_size
from ortmodule.capture.scalar_guards import Recorder
from ortmodule.core.errors import FillsCache
from ortmodule.core.size_expr import SizeFormula, formula_of, is_number
from ortmodule.core.torch_private import TracedValue, get_value_trace
from ortmodule.guards.inventory import Slot, path_of
from ortmodule.guards.isolation import Contents
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.reads.size_tables import SizeNumber

MOST_CALLS = 2  # that a module gets for filling its caches


def filling(names: Iterable[str]) -> str:
    """Why PyTorch runs a call that fills caches of these names."""
    return f"forward fills a cache ({', '.join(names)}), which later calls find"


def may_set_up(tree: Tree, text: str) -> None:
    """Raises FillsCache where forward changes parameters, which a first call may do (it scales them to its data), and
    PyTorch may run such a call. ``text``: which."""
    if tree.may_fill:
        raise FillsCache(f"{text}, as a first call may")


def put_resized(
    tree: Tree, places: Sequence[tuple[Any, Any]], tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Puts the last of ``tensors`` into these places of the module, and returns those of slots by their names."""
    slots = {(id(slot.holder), slot.key): slot.name for slot in tree.others}
    found: dict[str, torch.Tensor] = {}
    for (holder, key), tensor in zip(places, tensors[len(tensors) - len(places) :], strict=True):
        holder[key] = tensor
        if (id(holder), key) in slots:
            found[slots[id(holder), key]] = tensor
    return found


def check_caches(
    tree: Tree, sets: Sequence[Slot], met: Mapping[Any, int], versions: Mapping[str, tuple[torch.Tensor, int]],
    before: Mapping[str, Contents], given: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Raises FillsCache where forward has looked at what an attribute held, and set it, and tables beside it, to what
    does not follow from the values of the call's tensors ``given``.

    ``sets``: slots that it has set, beside tensors in the places of others; ``met``: the ids of what attributes were
    when forward looked at them first, by slots; ``versions``, ``before``: tensors, and attributes, when it began."""
    others = [slot for slot in tree.others if slot.find() is not versions[slot.name][0]]
    call = {get_value_trace(tensor).unique() for tensor in given}

    def then(slot: Slot) -> Any:
        if slot.name in versions:
            return versions[slot.name][0]
        return before[slot.name.rpartition(".")[0]].attributes.get(str(slot.key))

    tables, asked = [], False
    for slot in (*sets, *others):
        value: Any = slot.find()
        tensor = value.tensor if symbolic_numbers.is_one(value) else value
        if not isinstance(tensor, torch.Tensor) or tensor.requires_grad or follows_from(get_value_trace(tensor), call):
            continue
        asked = asked or met.get((id(slot.holder), slot.key)) == id(then(slot))
        # In place of a number it is one, too: where code is traced it may compute sizes by torch's functions.
        in_place_of_one = type(then(slot)) in (int, float) and not tensor.dim()
        if tensor is value and not is_number(tensor) and not in_place_of_one:
            tables.append(slot)
    if asked and tables:
        shapes = [tuple(get_value_trace(t).type().sizes()) for t in given]
        formulas = [(slot, _formula(slot.find()), then(slot)) for slot in sets]
        found = [(s, f) for s, f, number in formulas if type(number) in (int, float) or (f and number is None)]
        numbers = [SizeNumber(slot, formula, shapes) for slot, formula in found]
        raise FillsCache(filling(slot.name for slot in tables), tables, numbers)


def _formula(value: Any) -> SizeFormula | None:
    """How a number follows from sizes, if it does."""
    return formula_of(value) if isinstance(value, torch.Tensor) else None


def forget_own(
    recorder: Recorder, before: Mapping[str, Contents], versions: Mapping[str, tuple[torch.Tensor, int]]
) -> None:  # fmt: skip
    """Forgets reads of attributes that forward had set by then: what they were before the call is no matter."""
    for path, then in before.items():
        module = then.module
        looks = recorder.met
        for name in module.__dict__:
            if (id(module), name) not in recorder.attributes:
                continue
            value = then.attributes.get(name)  # None: there was none, which a look would have found
            value, _ = versions.get(path_of(path, name), (value, 0))
            if module.__dict__[name] is not value and looks.get((id(module.__dict__), name)) != id(value):
                del recorder.attributes[id(module), name]


def follows_from(value: TracedValue, call: Container[int]) -> bool:
    """Does ``value`` follow from the elements of tensors of the ``call``, or from chance?"""
    asked, known = [(value, False)], set()
    while asked:
        value, of_size = asked.pop()
        if (value.unique(), of_size) in known:
            continue
        known.add((value.unique(), of_size))
        if not of_size and value.unique() in call:
            return True
        behind, least = causes_of_size(value) if of_size else causes(value.node())
        if least in (RANDOM, OPAQUE):
            return True
        asked += behind
    return False
