"""Finds which items of a dictionary, or fields of a namespace, code reads where it loads one.

The classes of both cannot be changed, so that their reads cannot be seen (`capture/numbers/object_reads.py`). But where
code loads one, the next instructions tell: `self.options["scale"]`, `self.options.get("scale", 1)`,
`self.args.scale`, also by way of a local variable. Whatever else is done with it reads all of it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Classes of which only the items that are read count.
WITH_ITEMS = (dict, OrderedDict, types.SimpleNamespace)
ITEM, FIELD = "item", "field"
_MISSING = object()
#: A step into a container: ITEM and a key, or FIELD and a name.
Step = tuple[str, Any]

_CONSTANTS = {"LOAD_CONST", "LOAD_SMALL_INT"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_DEFAULTS = _CONSTANTS | {"LOAD_FAST", "LOAD_FAST_BORROW"}
_SIMPLE = _DEFAULTS | {"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"}
#: Make tuples and slices, and what is computed of items.
_BUILDING = {"BUILD_TUPLE", "BUILD_LIST", "LIST_EXTEND", "LIST_APPEND", "LIST_TO_TUPLE", "CALL_INTRINSIC_1",
             "BUILD_SLICE", "BINARY_SUBSCR", "BINARY_SLICE", "BINARY_OP"}  # fmt: skip
_IN_PLACE = {"+=", "-=", "*=", "/=", "//=", "@=", "%=", "**=", "&=", "|=", "^=", "<<=", ">>="}
MOST_STEPS = 16  # into each other


@dataclass
class ItemReads:
    """What is read of one container. ``whole``: all of it."""

    whole: bool = False
    items: dict[Step, ItemReads] = field(default_factory=dict)

    def add(self, other: ItemReads) -> None:
        self.whole |= other.whole
        for step, reads in other.items.items():
            self.items.setdefault(step, ItemReads()).add(reads)

    def of(self, step: Step) -> ItemReads:
        """What is read of what lies behind a step."""
        found = self.items.get(step, ItemReads())
        return ItemReads(True, found.items) if self.whole else found


def whole() -> ItemReads:
    return ItemReads(True)


def at(code: types.CodeType, offset: int, name: str) -> ItemReads:
    """What code reads of the attribute ``name`` that the instruction at ``offset`` reads."""
    steps, places = _instructions(code)
    i = places.get(offset)
    if i is None or steps[i].opname not in _ATTRIBUTES or steps[i].argval != name:
        return whole()
    if _is_set(steps[i + 1 :]) or steps[i + 1].opname == "STORE_ATTR":
        return ItemReads()
    return _behind(code, i, MOST_STEPS)


def are_own(value: Any, began: Mapping[int, Any], name: str, code: types.CodeType, offset: int) -> bool:
    """Has forward set all items that the instruction at ``offset`` reads of the attribute ``name``, which holds
    ``value``? ``began``: what containers held when it began, by their ids."""
    kind, held = (FIELD, vars(value)) if isinstance(value, types.SimpleNamespace) else (ITEM, value)
    then = began.get(id(held))
    if not isinstance(then, dict) or not isinstance(held, dict):
        return False
    reads = at(code, offset, name)
    if reads.whole or not reads.items:
        return False
    keys = [key for each, key in reads.items if each == kind]
    own = [key in held and held[key] is not then.get(key, _MISSING) for key in keys]
    return len(keys) == len(reads.items) and all(own)


def of_global(name: str, owner: Any, ran: Mapping[types.CodeType, dict[str, Any]]) -> ItemReads:
    """What code that has run, with its globals, reads of a variable of a module."""
    found = ItemReads(not ran)
    for code, space in ran.items():
        # By another way than as a global: `module.name`, `getattr(module, "name")`.
        if name in code.co_consts or (name in code.co_names and _is_attribute(code, name)):
            return whole()
        if space is vars(owner) and name in code.co_names:
            steps, _ = _instructions(code)
            for i, step in enumerate(steps):
                if step.opname in _GLOBALS and step.argval == name:
                    found.add(_behind(code, i, MOST_STEPS))
    return found


def _is_attribute(code: types.CodeType, name: str) -> bool:
    steps, _ = _instructions(code)
    return any(step.argval == name and step.opname not in _GLOBALS for step in steps)


@functools.lru_cache(maxsize=1024)
def _instructions(code: types.CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    """Those of code, and their numbers by where they begin."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE", "PRECALL")]
    return steps, {step.offset: i for i, step in enumerate(steps)}


def _behind(code: types.CodeType, i: int, most: int) -> ItemReads:
    """What is read of the value that instruction number ``i`` has loaded."""
    steps, _ = _instructions(code)
    after = steps[i + 1 : i + 5]
    if len(after) < 2 or not most:
        return whole()
    first, second, *rest = after
    if first.opname in _ATTRIBUTES:
        if first.argval == "get" and second.opname in _CONSTANTS and (end := _call_at(rest)) is not None:
            return ItemReads(items={(ITEM, second.argval): _behind(code, i + 3 + end, most - 1)})
        return ItemReads(items={(FIELD, first.argval): _behind(code, i + 1, most - 1)})
    if first.opname in _CONSTANTS and _is_subscript(second):
        return ItemReads(items={(ITEM, first.argval): _behind(code, i + 2, most - 1)})
    if first.opname == "STORE_FAST":
        return _of_local(code, first.argval, most - 1)
    return whole()


def _call_at(steps: Iterable[dis.Instruction]) -> int | None:
    """Which of these is the call of a method with one argument, or with a default, too."""
    for i, step in enumerate(steps):
        if step.opname == "CALL":
            return i
        if i or step.opname not in _DEFAULTS:
            return None
    return None


def _is_subscript(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _of_local(code: types.CodeType, name: str, most: int) -> ItemReads:
    """What is read of a local variable that one instruction sets."""
    count = code.co_argcount + code.co_kwonlyargcount
    flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
    if name in code.co_varnames[: count + flags]:
        return whole()
    return _of_variable(code, name, 1, lambda i: _behind(code, i, most))


def _of_variable(code: types.CodeType, name: str, stores: int, behind: Callable[[int], ItemReads]) -> ItemReads:
    """What is read of a local variable that so many instructions set. ``behind``: at one that loads it."""
    found = ItemReads()
    for i, step in enumerate(_instructions(code)[0]):
        if isinstance(step.argval, tuple) and name in step.argval and "FAST" in step.opname:
            return whole()
        if step.argval != name or step.opname in _CONSTANTS | _ATTRIBUTES | _GLOBALS:
            continue
        if step.opname.startswith("LOAD_FAST"):
            found.add(behind(i))
        elif step.opname == "STORE_FAST":
            stores -= 1
        else:
            return whole()
    return found if stores == 0 else whole()


# --- parameters -------------------------------------------------------------------------------------------------------


def of_parameter(code: types.CodeType, name: str, looking: Container[str] = (), own: bool = False) -> ItemReads:
    """What code reads of one of its parameters; what it returns of it aside, and what it gives to the builtin functions
    ``looking``. ``own``: its items may be set."""
    if name in code.co_cellvars:
        return whole()

    def behind(i: int) -> ItemReads:
        steps, _ = _instructions(code)
        if _is_given_to(looking, steps, i) or _is_returned(steps[i + 1 :]) or (own and _is_set(steps[i + 1 :])):
            return ItemReads()
        return _behind(code, i, MOST_STEPS)

    return _of_variable(code, name, 0, behind)


def _is_given_to(functions: Container[str], steps: Sequence[dis.Instruction], i: int) -> bool:
    """Is what number ``i`` loads the first of one or two arguments of one of these functions?"""
    first = i - 2 if steps[i - 1].opname == "PUSH_NULL" else i - 1
    called = first >= 0 and steps[first].opname in _GLOBALS and steps[first].argval in functions
    behind = [step.opname for step in steps[i + 1 : i + 3]]
    return called and (behind[:1] == ["CALL"] or (behind[0] in _SIMPLE and behind[1:] == ["CALL"]))


def _is_returned(steps: Sequence[dis.Instruction]) -> bool:
    """Do these return what was loaded, as it is, or in a tuple, or a slice of it: `return (x, *inputs[1:])`?"""
    for step in steps:
        if step.opname.startswith("RETURN_"):
            return True
        if step.opname not in _SIMPLE | _BUILDING or step.argrepr in _IN_PLACE:
            return False
    return False


def _is_set(steps: Sequence[dis.Instruction]) -> bool:
    """Do these set an item of what was loaded?"""
    return len(steps) > 1 and steps[0].opname in _SIMPLE and steps[1].opname == "STORE_SUBSCR"
