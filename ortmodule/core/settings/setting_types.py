"""Defines the types of settings: what they are called, and how a value is read from text.

A value that cannot be understood raises ValueError with the end of a sentence that begins with the setting.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortmodule import _core
from ortmodule.core.errors import NotAFolderError, NotWritableError, SettingError
from ortmodule.core.logger import LogLevel
from ortmodule.core.settings.safe_files import make_private, parse_json


def check_folder(path: str, what: str = "") -> None:
    """Raises OSError unless files can be made in the folder ``path``. ``what``: names it in the error."""
    begin = f"{what}: " if what else ""
    if not os.path.isdir(path):
        raise NotAFolderError(f"{begin}{path} is not a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise NotWritableError(f"{begin}the folder {path} cannot be written")


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing."""
    found = difflib.get_close_matches(word.upper(), known, 1, 0.5)
    return f"; did you mean {found[0]}?" if found else ""


@dataclass(frozen=True)
class Kind:
    """A type of values: how people call it, and how one is read from text (ValueError says what would be right)."""

    name: str
    parse: Callable[[str], Any]


_FLAGS = {"1": True, "TRUE": True, "ON": True, "YES": True, "0": False, "FALSE": False, "OFF": False, "NO": False}


def _flag(text: str) -> bool:
    if text.upper() not in _FLAGS:
        raise SettingError(f"is 1 or 0{nearest(text, _FLAGS)}")
    return _FLAGS[text.upper()]


def _auto_flag(text: str) -> str:
    if text.upper() == "AUTO":
        return "auto"
    try:
        return "1" if _flag(text) else "0"
    except ValueError as error:
        raise SettingError(f"is auto, {str(error).removeprefix('is ')}") from None


def number_from(least: int, most: int | None = None) -> Kind:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise SettingError("is a whole number") from None
        if number < least or (most is not None and number > most):
            near = least if number < least else most
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise SettingError(f"is a whole number, {allowed}; the nearest is {near}")
        return number

    return Kind(f"number from {least}" + ("" if most is None else f" to {most}"), parse)


def version_from(known: range, oldest: int) -> Kind:
    """A version; those before ``known``, from ``oldest`` on, are the first that is known."""
    kind = number_from(known.start, known.stop - 1)

    def parse(text: str) -> int:
        older = text.strip().isdecimal() and int(text) in range(oldest, known.start)
        return known.start if older else kind.parse(text)

    return Kind(kind.name, parse)


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise SettingError("is a number, as 0.1, or inf") from None
    if not number >= 0:
        raise SettingError("is a number from 0, or inf; the nearest is 0")
    return number


def one_of(*names: str, result: Callable[[str], Any] = str) -> Kind:
    def parse(text: str) -> Any:
        if text.upper() not in upper:
            raise SettingError(f"is one of {', '.join(names)}{nearest(text, upper)}")
        return result(upper[text.upper()])

    upper = {name.upper(): name for name in names}
    return Kind(" \\| ".join(f"`{name}`" for name in names), parse)


def some_of(*names: str) -> Kind:
    def parse(text: str) -> frozenset[str]:
        chosen = frozenset(name.strip().upper() for name in text.split("|"))
        for name in sorted(chosen - set(names)):
            raise SettingError(f"takes {', '.join(names)}, not {name or 'an empty name'}{nearest(name, names)}")
        return chosen

    return Kind("names joined by `\\|`: " + ", ".join(f"`{name}`" for name in names), parse)


def _pass_names(text: str) -> frozenset[str]:
    """With commas between (a list of JSON comes with \"|\")."""
    known = list(_core.passes())
    chosen = frozenset(name.strip().lower() for name in text.replace("|", ",").split(","))
    for name in sorted(chosen - set(known)):
        near = difflib.get_close_matches(name, known, 1, 0.5)
        advice = f"; did you mean {near[0]}?" if near else ""
        raise SettingError(f"takes names of passes ({', '.join(known)}), not {name or 'an empty name'}{advice}")
    return chosen


def _folder(text: str) -> str:
    try:
        check_folder(text)
    except OSError as error:
        raise SettingError(f"is a folder that can be written, but {error}") from None
    return text


def _private_folder(text: str) -> str:
    try:
        make_private(text)
    except OSError as error:
        raise SettingError(f"is a folder that can be made, and that only its owner can write, but {error}") from None
    return _folder(text)


def _file(text: str) -> str:
    if not os.path.isfile(text) or not os.access(text, os.R_OK):
        raise SettingError("is a file that can be read")
    return text


_WISH = re.compile(r"([^,:|]+\+):([012]):(-1|[0-9]+)")


def wishes_of(text: str) -> tuple[tuple[str, int, int], ...]:
    """(cluster, strategy, count) of each, from what ``CLUSTERS`` makes of a setting."""
    found = [_WISH.fullmatch(each) for each in text.split(",") if each]
    return tuple((m[1], int(m[2]), int(m[3])) for m in found if m is not None)


def _clusters(text: str) -> str:
    """The list itself with commas, be it given so or in a file; what a file says counts when it is read."""
    if os.path.isfile(text):
        try:
            content = parse_json(Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"is a JSON file, but {error}") from None
        if not isinstance(content, list) or not all(isinstance(each, str) for each in content):
            raise SettingError("is a JSON file with a list of texts")
        given = ",".join(content)
    elif ":" in text:
        given = text
    else:
        raise SettingError(
            "is a JSON file that can be read, or a list <cluster>:<strategy>:<count> with commas between"
        )
    wishes = [each.strip() for each in given.split(",") if each.strip()]
    for wish in wishes:
        if _WISH.fullmatch(wish) is None:
            raise SettingError(
                f"takes <cluster>:<strategy>:<count>, as Gelu+:1:-1, with a strategy from 0 to 2 and a count of at "
                f"least -1, not {wish}"
            )
    return ",".join(wishes)


_UNITS = {unit: 1024**i for i, unit in enumerate(("B", "KIB", "MIB", "GIB", "TIB"))} | {
    unit: 1000**i for i, unit in enumerate(("", "KB", "MB", "GB", "TB"))
}


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Z]*)", text.strip().upper())
    if found is None or found[2] not in _UNITS:
        raise SettingError("is a number of bytes, as 8GiB, 500MB or 1000000")
    return int(float(found[1]) * _UNITS[found[2]])


FLAG, AUTO_FLAG = Kind("flag: 1 or 0", _flag), Kind("`auto`, or a flag: 1 or 0", _auto_flag)
FOLDER = Kind("folder", _folder)
PRIVATE_FOLDER = Kind("folder that only its owner can write, made if it is missing", _private_folder)
SHARE = Kind("number from 0, or `inf`", _share)
PASSES = Kind("names of [passes](passes.md) with commas between", _pass_names)
FILE, PATH = Kind("file", _file), Kind("path", str)
CLUSTERS = Kind("JSON file, or its list with commas between", _clusters)
BYTES = Kind("bytes, as `8GiB` or `500MB`", _bytes)
LEVEL = one_of(*(level.name for level in LogLevel), result=LogLevel.__getitem__)

FALLBACK_POLICY = some_of(
    "FALLBACK_DISABLE",
    "FALLBACK_FORCE_TORCH_FORWARD",
    "FALLBACK_FORCE_TORCH_BACKWARD",
    "FALLBACK_UNSUPPORTED_DEVICE",
    "FALLBACK_UNSUPPORTED_DATA",
    "FALLBACK_UNSUPPORTED_TORCH_MODEL",
    "FALLBACK_UNSUPPORTED_ONNX_MODEL",
    "FALLBACK_BAD_INITIALIZATION",
)
SKIPCHECK_POLICY = some_of(
    "SKIP_CHECK_DISABLED", "SKIP_CHECK_DEVICE", "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT"
)
_UNSUPPORTED = ("DEVICE", "DATA", "TORCH_MODEL", "ONNX_MODEL")
