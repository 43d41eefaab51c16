"""Tells text that is only shown (printed, logged, an error's) from text that code goes on with, by its bytecode."""

from __future__ import annotations

import dis
import functools
import logging
import os
import types
import warnings

#: Functions and methods whose arguments people read.
_SHOWING = frozenset((
    "print", "pprint", "warn", "warn_explicit", "warn_once", "warning", "warning_once", "warning_advice", "info",
    "info_once", "debug", "error", "exception", "critical", "log", "_assert", "_check", "check", "set_description",
    "set_postfix",
))  # fmt: skip
#: Code that shows what it is given.
_SHOWERS = (os.path.join(os.path.dirname(logging.__file__), ""), warnings.__file__)
_ENDS = ("STORE_", "DELETE_", "POP_", "RETURN_", "RESUME", "JUMP", "RAISE", "YIELD", "FOR_ITER", "NOP", "END_")
_MAKING = ("LOAD_", "FORMAT_", "CONVERT_", "BUILD_", "BINARY_", "UNARY_", "CALL", "PRECALL", "PUSH_NULL", "KW_NAMES",
           "CACHE", "EXTENDED_ARG", "COPY", "SWAP", "RERAISE")  # fmt: skip


def is_shown(frame: types.FrameType) -> bool:
    """Does ``frame`` make a text now that is only shown?"""
    code = frame.f_code
    return code.co_filename.startswith(_SHOWERS) or _is_shown_at(code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _is_shown_at(code: types.CodeType, offset: int) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    at = next((i for i, step in enumerate(steps) if step.offset == offset), None)
    if at is None:
        return False
    end = next((i for i in range(at + 1, len(steps)) if not steps[i].opname.startswith(_MAKING)), None)
    if end is None:
        return False
    if steps[end].opname == "RAISE_VARARGS":
        return True
    if steps[end].opname != "POP_TOP":
        return False
    begin = next((i + 1 for i in range(at, -1, -1) if steps[i].opname.startswith(_ENDS)), 0)
    return _called(steps[begin:end]) in _SHOWING


def _called(steps: list[dis.Instruction]) -> str | None:
    """The name of what a statement calls: `log` of `self.logger.log(...)`."""
    found = None
    for step in steps:
        if step.opname in ("PUSH_NULL", "EXTENDED_ARG"):
            continue
        if found is not None and step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        if not step.opname.startswith("LOAD_"):
            break
        found = step.argval
        if step.opname == "LOAD_METHOD":
            break
    return found if isinstance(found, str) else None
