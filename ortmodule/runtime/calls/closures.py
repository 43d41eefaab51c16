"""Runs something after each call of a closure that an optimizer's step is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def followed(optimizer: Any, args: tuple, kwargs: dict, then: Callable[[], None]) -> tuple[tuple, dict] | None:
    """The arguments of a step, with ``then`` after each call of a closure; None for a step without one."""
    values = [value for value in (*args, *kwargs.values()) if value is not optimizer]
    if not any(map(callable, values)):
        return None

    def change(value: Any) -> Any:
        return _followed(value, then) if callable(value) and value is not optimizer else value

    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


def _followed(closure: Callable, then: Callable[[], None]) -> Callable:
    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        then()
        return result

    return call
