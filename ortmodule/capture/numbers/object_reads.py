"""Notes which fields of plain objects (a configuration, a global helper) forward reads while it is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from ortmodule.capture.scalar_guards import Recorder, active, user_line
from ortmodule.core.names import PACKAGE
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.pytree import CONSTANTS
from ortmodule.guards.descriptions import plain_objects
from ortmodule.guards.fields import is_watchable
from ortmodule.guards.isolation import Contents
from ortmodule.guards.writes.surroundings import values_around


def watched(
    recorder: Recorder, around: Iterable[Any], held: Iterable[Contents]
) -> AbstractContextManager[None]:  # fmt: skip
    """Inside, reads of fields go to ``recorder.fields``. ``around``: values that are around the module; ``held``: what
    its submodules hold. Both were there before the trace."""
    inside: dict[int, Any] = {}
    for contents in held:
        for name in contents.inside:
            inside |= {id(each): each for each in plain_objects(contents.attributes[name])}
    behind = [each for each in values_around(inside.values()) if id(each) not in inside]
    kinds: dict[type, bool] = {}
    reads = recorder.fields
    for each, is_around in (*((v, False) for v in inside.values()), *((v, True) for v in (*around, *behind))):
        cls = type(each)
        if cls not in kinds:
            kinds[cls] = not isinstance(each, (type, *CONSTANTS)) and is_watchable(cls)
        if kinds[cls]:
            reads.objects[id(each)] = each
            reads.around |= {id(each)} if is_around else set()
    return replaced([_watching(cls) for cls in reads.classes()])


def _watching(cls: type) -> Replacement:
    def make(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def read(value: Any, name: str) -> Any:
            _note(value, name)
            return original(value, name)

        return read

    return Replacement.around(cls, "__getattribute__", make)


def _note(value: Any, name: str) -> None:
    recorder = active()
    if recorder is None or id(value) not in recorder.fields.objects or (id(value), name) in recorder.fields.names:
        return
    if _is_own(recorder, value, name):
        return
    frame = sys._getframe(2)
    if not frame.f_code.co_filename.startswith(PACKAGE):
        recorder.fields.names[id(value), name] = user_line(frame)


def _is_own(recorder: Recorder, value: Any, name: str) -> bool:
    """Has forward set this field before?"""
    try:
        now = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return False
    then = recorder.began.get(id(now))
    return isinstance(then, dict) and name in now and (name not in then or now[name] is not then[name])
