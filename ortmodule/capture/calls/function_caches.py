"""Leaves caches of functions (`functools.lru_cache`) out of a trace: the sizes of a trace are no keys.

A size that is traced is a tensor. As the key of a cache it counts as its number, so the graph would be for this size
alone, and the cache would keep tensors of the trace. So while a module is traced a call that is given traced sizes goes
to the function behind the cache, where a module or a class of it holds the cache by name, or the cache of one of their
functions is a variable of that function's closure.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, get_args

import torch

from ortmodule.core.objects.interception import Replacement, own, replaced
from ortmodule.core.torch_private import get_tracing_state
from ortmodule.guards.code_reader import MODULES, all_globals, is_library

_Cache = functools._lru_cache_wrapper
_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_PLAIN = {"torch", "ortmodule", *sys.stdlib_module_names}  # packages whose caches get no sizes
#: Modules that were looked at, by name, and what stands in place of the caches that were found, with what they hold.
_known: dict[str, tuple[Any, list[tuple[Any, Replacement]]]] = {}
#: All modules at the latest look, and what was found in all of them but `__main__`, which grows in a notebook.
_latest: tuple[list[Any], list[tuple[Any, Replacement]]] = [], []


def _behind(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _is_given_something(value: Any) -> bool:
    """Is it a cache that may get sizes? One of a function without parameters (is this library installed?) gets none,
    nor does a library's whose parameters are texts and truth values: libraries import them into hundreds of modules."""
    cache = _behind(value)
    return isinstance(cache, _Cache) and _may_take_sizes(cache.__wrapped__)


def _may_take_sizes(function: Any) -> bool:
    code, module = getattr(function, "__code__", None), sys.modules.get(getattr(function, "__module__", None) or "")
    if code is None:
        return True
    if not (code.co_argcount or code.co_kwonlyargcount or code.co_flags & _VARIADIC):
        return False
    if module is None or not is_library(module):
        return True
    try:
        return not all(map(_is_text_or_truth, inspect.signature(function).parameters.values()))
    except Exception:  # an annotation may be anything
        return True


def _is_text_or_truth(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return isinstance(parameter.default, (bool, str))
    if isinstance(annotation, str):  # as it stands in the source
        return {each.strip() for each in annotation.split("|")} <= {"str", "bool", "None"}
    return set(get_args(annotation) or [annotation]) <= {str, bool, types.NoneType}


def _caches_of(module: Any) -> list[tuple[Any, Replacement]]:
    found, name_of_module = [], module.__name__
    for name, value in list(vars(module).items()):
        if isinstance(value, _Cache) and _is_given_something(value):
            found.append((value, _replacement(module, name, value)))
        elif isinstance(value, type) and value.__module__ == name_of_module:
            held = [(key, each) for key, each in vars(value).items() if _is_given_something(each)]
            found += [(each, _replacement(value, key, each)) for key, each in held]
            for each in vars(value).values():
                found += _caches_within(_behind(each), name_of_module)
        else:
            found += _caches_within(value, name_of_module)
    return found


def _caches_within(function: Any, name_of_module: str) -> list[tuple[Any, Replacement]]:
    """Those that a function of this module has around it: a decorator's, which asks before it looks into one."""
    if not isinstance(function, types.FunctionType) or function.__module__ != name_of_module:
        return []
    held = [(cell, each) for cell in function.__closure__ or () if isinstance(each := _inside(cell), _Cache)]
    return [(each, _replacement(cell, "cell_contents", each)) for cell, each in held if _is_given_something(each)]


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet
        return None


def _replacement(owner: Any, name: str, value: Any) -> Replacement:
    cache = _behind(value)
    call = _around(cache)
    return Replacement(owner, name, call if cache is value else type(value)(call))


def _caches() -> list[tuple[Any, Replacement]]:
    global _latest
    modules = list(sys.modules.values())
    if len(modules) != len(_latest[0]) or not all(map(operator.is_, modules, _latest[0])):
        _latest = modules, [each for name in list(sys.modules) if name != "__main__" for each in _found_in(name)]
    others = [each for each in (sys.modules.get("__main__"), *all_globals()) if isinstance(each, MODULES)]
    return [*_latest[1], *(cache for each in others for cache in _caches_of(each))]


def _found_in(name: str) -> list[tuple[Any, Replacement]]:
    """Those of one module, which is looked at once."""
    module, known = sys.modules.get(name), _known.get(name)
    if known is None or known[0] is not module:
        plain = name.partition(".")[0] in _PLAIN or not hasattr(module, "__dict__")
        known = _known[name] = module, [] if plain or not hasattr(module, "__name__") else _caches_of(module)
    return known[1]


def _holds_traced(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_traced, value))
    return isinstance(value, torch.Tensor)


def _around(cache: Any) -> Callable:
    @functools.wraps(cache)
    def call(*args: Any, **kwargs: Any) -> Any:
        traced = get_tracing_state() is not None and (_holds_traced(args) or _holds_traced((*kwargs.values(),)))
        return cache.__wrapped__(*args, **kwargs) if traced else cache(*args, **kwargs)

    for name in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(call, name, getattr(cache, name))
    return call


def left_out() -> AbstractContextManager[None]:
    """Inside, calls with traced sizes go past caches of functions."""
    return replaced([each for value, each in _caches() if own(each.owner, each.name) is value])
