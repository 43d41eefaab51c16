"""Finds the dispatcher of a wrapped module, which `module.py` keeps beside the module's own attributes."""

from __future__ import annotations

from typing import Any


def dispatcher_of(module: Any) -> Any:
    """The dispatcher (of a later package, `runtime`) that runs the calls of an ORTModule; None for another object.

    It asks no `__getattribute__` or `__getattr__` of the module's, which a trace watches.
    """
    slot = getattr(type(module), "_ortmodule", None)
    return None if slot is None else slot.__get__(module)
