"""Reads environment variables and context variables as attributes of objects, so that guards compare them."""

from __future__ import annotations

import contextvars
import os
from typing import Any

_ENVIRONMENT: Any = os.environ


class _Variables:
    """``getattr(ENVIRONMENT, "HOME")``: the bytes that the variable holds, one object until it is set anew, or None."""

    __name__ = "os.environ"

    def __getattr__(self, name: str) -> bytes | None:
        return _ENVIRONMENT._data.get(_ENVIRONMENT.encodekey(name))


ENVIRONMENT = _Variables()


class _Variable:
    """``value``: what a context variable holds here; itself where it holds nothing."""

    def __init__(self, variable: contextvars.ContextVar) -> None:
        self._variable, self.__name__ = variable, f"the context variable {variable.name}"

    @property
    def value(self) -> Any:
        try:
            return self._variable.get()
        except LookupError:
            return self._variable


_known: dict[contextvars.ContextVar, _Variable] = {}


def of_context(variable: contextvars.ContextVar) -> _Variable:
    """The one object for this variable."""
    return _known.setdefault(variable, _Variable(variable))
