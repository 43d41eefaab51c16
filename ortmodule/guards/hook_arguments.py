"""Finds hooks that may change, or keep, containers that their module is given: lists, dictionaries, a key-value cache.

Hooks run in no trace, so what they put into a container shows in none. In a run each break of a graph gets containers
of its own: one that a hook keeps would not see what forward puts there later on. Instructions tell which arguments a
hook reads, item by item (`inputs[0]`). One that it reads otherwise counts, if there is a container inside.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from ortmodule.core import pytree
from ortmodule.core.errors import Unflattenable
from ortmodule.guards.module_hooks import ARGUMENTS, MODULE, NAMED, RESULT
from ortmodule.guards.reads.item_reads import ITEM, ItemReads, Step, of_parameter

#: Are called with a value, and neither change nor keep it.
_LOOKING = frozenset({"bool", "hasattr", "id", "isinstance", "len", "print", "repr", "str", "type"})


def changeable(args: tuple, kwargs: dict[str, Any]) -> frozenset[int]:
    """The ids of the containers in arguments, but for tuples. Raises Unflattenable."""
    found = pytree.containers((args, tuple(kwargs.values())))
    return frozenset(id(each) for each in found if not isinstance(each, tuple))


def takes(
    hooks: Iterable[tuple[Any, tuple[str, ...]]], held: frozenset[int], args: tuple, kwargs: dict[str, Any], result: Any
) -> bool:
    """May one of these hooks (`ModuleHooks.seeing`) change or keep a container with an id in ``held``? ``result``: of
    the module; () before it has run."""
    given = {MODULE: (), ARGUMENTS: args, NAMED: kwargs, RESULT: result}
    return any(_hook_takes(hook, [(given[part], part == NAMED) for part in parts], held) for hook, parts in hooks)


def _hook_takes(hook: Any, given: list[tuple[Any, bool]], held: frozenset[int]) -> bool:
    """``given``: values, and whether each is the dictionary of a call's named arguments, whose items may be set."""
    if not any(_holds(value, held) for value, _ in given):
        return False
    found = _function_of(hook)
    if found is None:
        return True
    function, before = found
    code = function.__code__
    if before + len(given) > code.co_argcount:
        return True
    looking = frozenset(name for name in _LOOKING if name not in function.__globals__)
    names = code.co_varnames[before : before + len(given)]
    return any(
        _is_reached(value, of_parameter(code, name, looking, own), held)
        for name, (value, own) in zip(names, given, strict=True)
    )


def _function_of(hook: Any) -> tuple[types.FunctionType, int] | None:
    """The function that a call of ``hook`` runs, and how many parameters are bound; None: it is not known."""
    bound = 0
    while isinstance(hook, functools.partial):
        if hook.keywords:
            return None
        bound, hook = bound + len(hook.args), hook.func
    if not isinstance(hook, (types.FunctionType, types.MethodType)):
        hook = getattr(hook, "__call__", None)  # noqa: B004  (it is bound, if its class has it in Python)
    if isinstance(hook, types.MethodType):
        bound, hook = bound + 1, hook.__func__
    while isinstance(hook, types.FunctionType) and hasattr(hook, "__wrapped__") and _is_of_torch(hook):
        hook = inspect.unwrap(hook, stop=lambda each: not _is_of_torch(each))
    return (hook, bound) if isinstance(hook, types.FunctionType) else None


def _is_of_torch(function: Callable) -> bool:
    """Is it a wrapper of torch's, such as `torch.no_grad()` puts around a function?"""
    return hasattr(function, "__wrapped__") and getattr(function, "__globals__", {}).get("__name__", "").startswith(
        "torch."
    )


def _is_reached(value: Any, reads: ItemReads, held: frozenset[int]) -> bool:
    """Does code that reads this of ``value`` get one of the containers ``held``?"""
    if not _holds(value, held):
        return False
    return reads.whole or any(
        inner is None or _is_reached(item, inner, held)
        for item, inner in (_read(value, step, inner) for step, inner in reads.items.items())
    )


def _read(value: Any, step: Step, inner: ItemReads) -> tuple[Any, ItemReads | None]:
    """What a step into ``value`` reads, and what is read of that; None for the second: it is not known."""
    kind, key = step
    if kind == ITEM and isinstance(value, (tuple, list, dict)):
        try:
            return value[key], inner
        except (LookupError, TypeError):  # there is none
            return None, inner
    fields = getattr(value, "__dict__", {})
    return (fields[key], inner) if key in fields else (None, None)


def _holds(value: Any, held: frozenset[int]) -> bool:
    """Is one of the containers ``held`` in it?"""
    try:
        return any(id(each) in held for each in pytree.containers(value))
    except Unflattenable:
        return bool(held)
