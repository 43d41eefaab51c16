"""Meets calls of submodules, of their methods and of autograd functions, for what looks at them in this thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ortmodule.core.objects.interception import Replacement, original, replaced
from ortmodule.host import autograd_functions
from ortmodule.host.opaque_regions import Regions
from ortmodule.host.passed_calls import Passed

_current = threading.local()


def _active() -> Regions | Passed | None:
    regions = getattr(_current, "regions", None)
    return None if regions is None or not regions.active() else regions


def _module_call(original: Callable) -> Callable:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        regions = _active()
        if regions is None:
            return original(module, *args, **kwargs)
        path = regions.paths.get(id(module))
        try:
            if path is not None:
                return regions.module(module, path, original, args, kwargs)
            regions.begins()  # an error is of the submodule around
            regions.stack.append(regions.names.get(id(module), ""))
            try:
                result = original(module, *args, **kwargs)
                regions.traced()
                return result
            except Exception as error:
                regions.blame(error, module)
                raise
            finally:
                regions.stack.pop()
        finally:
            regions = None

    return call


def _method_call(name: str, original: Callable) -> Callable:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        regions = _active()
        label = None if regions is None else regions.methods.get((id(module), name))
        if regions is None or label is None:
            return original(module, *args, **kwargs)
        return regions.method(module, label, original, args, kwargs)

    return call


def _replacements(regions: Regions | Passed) -> Iterator[Replacement]:
    """What meets calls of submodules, and of their methods."""
    modules = {id(m): m for m in regions.tree.modules.values()}
    # A layer of transformers begins a checkpoint in a `__call__` of its own.
    owners = {cls for m in modules.values() for cls in type(m).__mro__ if "__call__" in vars(cls)}
    for cls in owners:
        if issubclass(cls, nn.Module):
            yield Replacement(cls, "__call__", _module_call(original(cls, "__call__")))
    methods = {
        (next(cls for cls in type(modules[key]).__mro__ if name in vars(cls)), name) for key, name in regions.methods
    }
    for cls, name in methods:
        yield Replacement.around(cls, name, functools.partial(_method_call, name))


@contextmanager
def recording(regions: Regions | Passed) -> Iterator[None]:
    """Inside, in this thread, calls of functions, submodules and their methods go to ``regions``, when it is active."""

    def met(cls: type, forward: Callable, args: tuple, kwargs: dict, grad: bool) -> tuple[Any, Callable | None] | None:
        regions = _active()
        return None if regions is None else regions.function(cls, forward, args, kwargs, grad)

    before, _current.regions = getattr(_current, "regions", None), regions
    try:
        with replaced(_replacements(regions)), autograd_functions.meeting(met):
            yield
    finally:
        _current.regions = before
