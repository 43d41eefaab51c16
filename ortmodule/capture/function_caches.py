"""Leaves caches of functions (`functools.lru_cache`) out of a trace: the sizes of a trace are no keys.

A size that is traced is a tensor. As the key of a cache it counts as its number, so the graph would be for this size
alone, and the cache would keep tensors of the trace. So while a module is traced a call that is given traced sizes goes
to the function behind the cache, where a module or a class of it holds the cache by name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from ortmodule.core.interception import Replacement, replaced
from ortmodule.core.torch_private import get_tracing_state

_Cache = functools._lru_cache_wrapper
_PLAIN = {"torch", "ortmodule", *sys.stdlib_module_names}  # packages whose caches get no sizes
#: Modules that were looked at, by name, and what was found: (the module or class, the name, what it holds).
_known: dict[str, tuple[Any, list[tuple[Any, str, Any]]]] = {}


def _behind(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _caches_of(module: Any) -> list[tuple[Any, str, Any]]:
    found, name_of_module = [], module.__name__
    for name, value in list(vars(module).items()):
        if isinstance(value, _Cache):
            found.append((module, name, value))
        elif isinstance(value, type) and value.__module__ == name_of_module:
            held = list(vars(value).items())
            found += [(value, key, each) for key, each in held if isinstance(_behind(each), _Cache)]
    return found


def _caches() -> Iterator[tuple[Any, str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PLAIN or not hasattr(module, "__dict__") or not hasattr(module, "__name__"):
            continue
        # The module of a notebook grows.
        if name == "__main__" or name not in _known or _known[name][0] is not module:
            _known[name] = module, _caches_of(module)
        yield from _known[name][1]


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
    return replaced(list(_replacements()))


def _replacements() -> Iterator[Replacement]:
    for owner, name, value in _caches():
        cache = _behind(value)
        if vars(owner).get(name) is value:
            call = _around(cache)
            yield Replacement(owner, name, call if cache is value else type(value)(call))
