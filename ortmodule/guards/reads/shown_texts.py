"""Tells text that is only shown (printed, logged, an error's) from text that code goes on with, by its bytecode.

A text that a function keeps in a variable is shown where each use of the variable is.
"""

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

_WRITING = ("FORMAT_", "CONVERT_", "BUILD_STRING", "BINARY_OP")
_BESIDE = ("LOAD_", "PUSH_NULL", "PRECALL", "CALL", "BINARY_SUBSCR", "EXTENDED_ARG", "COPY")
_CALLING = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
_SEES_VARIABLES = frozenset(("locals", "vars", "eval", "exec", "_getframe"))


def is_shown(frame: types.FrameType) -> bool:
    """Does ``frame`` make a text now that is only shown?"""
    code = frame.f_code
    return code.co_filename.startswith(_SHOWERS) or _is_shown_at(code, frame.f_lasti)


def is_written(frame: types.FrameType) -> bool:
    """Does ``frame`` write a number into such a text now, by `"%d" % n`?"""
    return _writes_at(frame.f_code, frame.f_lasti) and is_shown(frame)


@functools.lru_cache(maxsize=1024)
def _writes_at(code: types.CodeType, offset: int) -> bool:
    step = next((step for step in dis.get_instructions(code) if step.offset == offset), None)
    return step is not None and step.opname == "BINARY_OP" and step.argrepr in ("%", "%=")


@functools.lru_cache(maxsize=1024)
def _is_shown_at(code: types.CodeType, offset: int) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    at = next((i for i, step in enumerate(steps) if step.offset == offset), None)
    return at is not None and _is_only_shown(steps, at, set(), not _SEES_VARIABLES.isdisjoint(code.co_names))


def _is_only_shown(steps: list[dis.Instruction], at: int, met: set[str], seen: bool) -> bool:
    """Is the text that the instruction ``at`` makes, or loads? ``met``: variables that are looked at, or have been;
    ``seen``: others see all variables."""
    end = next((i for i in range(at + 1, len(steps)) if not steps[i].opname.startswith(_MAKING)), None)
    if end is None:
        return False
    if steps[end].opname == "RAISE_VARARGS":
        return True
    if steps[end].opname == "STORE_FAST" and not seen:
        return _is_plain(steps[at + 1 : end]) and _is_shown_variable(steps, steps[end].argval, met)
    if steps[end].opname != "POP_TOP":
        return False
    begin = next((i + 1 for i in range(at, -1, -1) if steps[i].opname.startswith(_ENDS)), 0)
    return _called(steps[begin:end]) in _SHOWING


def _is_plain(steps: list[dis.Instruction]) -> bool:
    """Do these, behind a text, but put it together with others? ``depth``: how much is above it on the stack."""
    depth = 0
    for step in steps:
        effect, name, count = dis.stack_effect(step.opcode, step.arg, jump=False), step.opname, step.arg or 0
        if name.startswith(_WRITING):
            depth = max(depth + effect, 0)
            continue
        takes = 1 if name in ("LOAD_ATTR", "LOAD_METHOD") else 2 if name == "BINARY_SUBSCR" else 0
        takes = count + 2 if name == _CALLING else takes
        if takes > depth or not name.startswith(_BESIDE):
            return False
        depth += effect
    return True


def _is_shown_variable(steps: list[dis.Instruction], name: str, met: set[str]) -> bool:
    if name in met:
        return True
    met.add(name)
    uses = [i for i, s in enumerate(steps) if s.opname.startswith("LOAD_FAST") and name in (s.argval, s.argrepr)]
    several = any(s.opname.count("FAST") > 1 and name in s.argrepr for s in steps)  # of one instruction
    return not several and all(_is_only_shown(steps, i, met, False) for i in uses)


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
