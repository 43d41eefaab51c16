"""Reads environment variables, context variables and settings as attributes of objects, so that guards compare them."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
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


class Setting:
    """``value``: what a function of a library's says of the process, one object until it says another; the class of
    the error that it raises instead."""

    def __init__(self, function: Callable[..., Any], args: tuple) -> None:
        self._function, self._args, self._latest = function, args, None
        self.__name__ = f"{function.__name__}()"

    @property
    def value(self) -> Any:
        try:
            found = self._function(*self._args)
        except Exception as error:
            found = type(error)
        if type(found) is not type(self._latest) or found != self._latest:
            self._latest = found
        return self._latest


_settings: dict[tuple, Setting] = {}


def of_setting(function: Callable[..., Any], args: tuple = ()) -> Setting:
    """The one object for a call of this function. Raises TypeError for arguments that cannot be hashed."""
    return _settings.setdefault((function, args), Setting(function, args))
