"""What ortmodule tells a person: one logger, and warnings that come once."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch

from ortmodule.options import LogLevel

LOGGER = logging.getLogger("ortmodule")
_LEVELS = {
    LogLevel.VERBOSE: logging.DEBUG,
    LogLevel.DEVINFO: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
    LogLevel.FATAL: logging.CRITICAL,
}


class Log:
    """The voice of one wrapped module. A level other than the default sets that of the logger, too."""

    def __init__(self, name: str, level: LogLevel) -> None:
        self.name = name
        self._warns = _LEVELS[level] <= logging.WARNING
        self._said: set[str] = set()
        if level != LogLevel.WARNING:
            LOGGER.setLevel(_LEVELS[level])
            if not LOGGER.hasHandlers():
                LOGGER.addHandler(logging.StreamHandler())

    def debug(self, text: str) -> None:
        LOGGER.debug("%s: %s", self.name, text)

    def info(self, text: str) -> None:
        LOGGER.info("%s: %s", self.name, text)

    def warn_once(self, text: str) -> None:
        """A warning that a module gives only once, to the log and through :mod:`warnings`."""
        if text not in self._said:
            self._said.add(text)
            LOGGER.warning("%s: %s", self.name, text)
            if self._warns:
                warnings.warn(f"ORTModule({self.name}): {text}", stacklevel=_callers_level())


def _callers_level() -> int:
    """The `stacklevel` of the first frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    inside = (os.path.dirname(__file__), torch.__path__[0])
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
