"""Settings: what `DebugOptions` and the environment say.

Every environment variable is declared once, in :data:`VARIABLES`; values are read when a module is wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ortmodule.export import DEFAULT_OPSET, OPSETS

PREFIX = "ORTMODULE_"


class LogLevel(IntEnum):
    """How much is reported, the most first."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


class DebugOptions:
    """How a wrapped module reports what it does.

    ``log_level``: a :class:`LogLevel`; ``ORTMODULE_LOG_LEVEL`` beats it. ``save_onnx``: write the graphs to
    ``<save_path>/<onnx_prefix>_*.onnx``; needs ``onnx_prefix``.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str = "",
        config: Any = None,
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"log_level is a LogLevel, not {type(log_level).__name__}")
        if save_onnx and not onnx_prefix:
            raise ValueError("save_onnx=True needs an onnx_prefix")
        self.log_level, self.config = log_level, config
        self.save_onnx, self.onnx_prefix, self.save_path = save_onnx, onnx_prefix, save_path


@dataclass(frozen=True)
class Variable:
    """One environment variable, without its prefix."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    doc: str

    def read(self) -> Any:
        """Its value; ValueError naming it when it cannot be understood."""
        text = os.environ.get(PREFIX + self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{PREFIX}{self.name}={text}: {error}") from None


def _opset(text: str) -> int:
    opset = int(text)
    if opset not in OPSETS:
        raise ValueError(f"{OPSETS.start} to {OPSETS.stop - 1} are supported")
    return opset


def _log_level(text: str) -> LogLevel:
    try:
        return LogLevel[text.upper()]
    except KeyError:
        raise ValueError("one of " + ", ".join(level.name for level in LogLevel)) from None


#: Policies that say when PyTorch may take over.
FALLBACK_POLICIES = (
    "FALLBACK_DISABLE",
    "FALLBACK_FORCE_TORCH_FORWARD",
    "FALLBACK_FORCE_TORCH_BACKWARD",
    "FALLBACK_UNSUPPORTED_DEVICE",
    "FALLBACK_UNSUPPORTED_DATA",
    "FALLBACK_UNSUPPORTED_TORCH_MODEL",
    "FALLBACK_UNSUPPORTED_ONNX_MODEL",
    "FALLBACK_BAD_INITIALIZATION",
)


def _policies(text: str) -> frozenset[str]:
    names = frozenset(name.strip().upper() for name in text.split("|"))
    for name in names:
        if name not in FALLBACK_POLICIES:
            raise ValueError(f"{name} is none of " + ", ".join(FALLBACK_POLICIES))
    return names


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable("ONNX_OPSET_VERSION", DEFAULT_OPSET, _opset, "the ONNX opset to export with"),
        Variable("LOG_LEVEL", None, _log_level, "how much is reported; beats DebugOptions"),
        Variable(
            "FALLBACK_POLICY",
            frozenset(name for name in FALLBACK_POLICIES if "_UNSUPPORTED_" in name),
            _policies,
            "when PyTorch may run the module instead, names joined by |",
        ),
    )
}


@dataclass(frozen=True)
class Options:
    """The settings of one wrapped module."""

    opset: int
    log_level: LogLevel
    fallback: frozenset[str]
    debug: DebugOptions

    @staticmethod
    def read(debug: DebugOptions | None = None) -> Options:
        """``debug`` and the environment; raises ValueError for what cannot be understood."""
        if debug is not None and not isinstance(debug, DebugOptions):
            raise TypeError(f"debug_options is a DebugOptions, not {type(debug).__name__}")
        debug = debug or DebugOptions()
        value = {name: variable.read() for name, variable in VARIABLES.items()}
        level = debug.log_level if value["LOG_LEVEL"] is None else value["LOG_LEVEL"]
        return Options(value["ONNX_OPSET_VERSION"], level, value["FALLBACK_POLICY"], debug)
