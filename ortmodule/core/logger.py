"""Logs: one logger, warnings that come once, and a progress bar while a graph is built.

Everything goes through ``logging.getLogger("ortmodule")``; what the engine does goes through its child
``ortmodule.engine``, whose level is another one. A :class:`LogLevel` decides both levels, whether ranks other than 0
speak, and what of the exporter is shown.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from tqdm import std
from tqdm.auto import tqdm

from ortmodule.core.names import PACKAGE


class LogLevel(IntEnum):
    """How much is reported, the most first."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


LOGGER = logging.getLogger("ortmodule")
ENGINE = logging.getLogger("ortmodule.engine")

# Level -> (our logger's, the engine's).
_LEVELS = {
    LogLevel.VERBOSE: (logging.DEBUG, logging.DEBUG),
    LogLevel.DEVINFO: (logging.INFO, logging.INFO),
    LogLevel.INFO: (logging.INFO, logging.WARNING),
    LogLevel.WARNING: (logging.WARNING, logging.WARNING),
    LogLevel.ERROR: (logging.ERROR, logging.ERROR),
    LogLevel.FATAL: (logging.CRITICAL, logging.CRITICAL),
}


def rank() -> int:
    """Of this process among those that train together; 0 when it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


class _Ranks(logging.Filter):
    """Lets records pass on rank 0, on the others if ``all_ranks``."""

    all_ranks = False

    def filter(self, record: logging.LogRecord) -> bool:
        return self.all_ranks or rank() == 0


#: What shows our log where a script has set up none.
_OWN = logging.StreamHandler()


def _is_kept() -> bool:
    """Has the script set up a log, which is to have warnings, too?"""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(handler is not _OWN for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


_RANKS = _Ranks()
LOGGER.addFilter(_RANKS)
ENGINE.addFilter(_RANKS)


#: Does `tqdm.auto` draw bars of a notebook?
IN_NOTEBOOK = not issubclass(tqdm, std.tqdm) or tqdm.__init__.__module__ == "tqdm.notebook"


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A progress bar without a thread that looks after it."""

    monitor_interval = 0


class Log:
    """The voice of one wrapped module. A level other than the default sets that of the loggers, too."""

    def __init__(self, name: str, level: LogLevel) -> None:
        self.name, self.level = name, level
        self._said: set[str] = set()
        if level != LogLevel.WARNING:
            _RANKS.all_ranks = level <= LogLevel.DEVINFO
            for logger, value in zip((LOGGER, ENGINE), _LEVELS[level], strict=True):
                logger.setLevel(value)
            if not LOGGER.hasHandlers():
                LOGGER.addHandler(_OWN)

    @property
    def shows_exporter(self) -> bool:
        """Are remarks of tracer and exporter shown?"""
        return self.level <= LogLevel.DEVINFO

    def debug(self, text: str) -> None:
        LOGGER.debug("%s: %s", self.name, text)

    def info(self, text: str) -> None:
        LOGGER.info("%s: %s", self.name, text)

    def always(self, text: str) -> None:
        """What was asked for: it is shown whatever the level is."""
        LOGGER.log(max(logging.INFO, LOGGER.getEffectiveLevel()), "%s: %s", self.name, text)

    def warning(self, text: str) -> None:
        LOGGER.warning("%s: %s", self.name, text)

    def warn_once(self, text: str, level: int = logging.WARNING) -> None:
        """A warning that a module gives only once, through :mod:`warnings`, and to a log that a script has set up.
        ``level``: of the log; an error is shown where warnings are not."""
        if text not in self._said:
            self._said.add(text)
            if _is_kept():
                LOGGER.log(level, "%s: %s", self.name, text)
            shown = LogLevel.WARNING if level == logging.WARNING else LogLevel.ERROR
            if self.level <= shown and (_RANKS.all_ranks or rank() == 0):
                warnings.warn(f"ORTModule({self.name}): {text}", stacklevel=callers_level())

    @contextmanager
    def building(self, phases: int) -> Iterator[Any]:
        """A progress bar on a terminal or in a notebook: call what is given with the name of each phase that begins."""
        shown = sys.stderr.isatty() or IN_NOTEBOOK
        if rank() != 0 or self.level > LogLevel.WARNING or not shown:
            yield lambda phase: None
            return
        shape = "{desc}: {bar:20}{postfix}"
        look = {} if IN_NOTEBOOK else {"bar_format": shape, "file": sys.stderr}
        with _Bar(total=phases, desc=self.name, leave=False, **look) as bar:
            begun = 0

            def begins(phase: str) -> None:
                nonlocal begun
                bar.update(min(begun, 1))
                bar.set_postfix_str(phase)
                begun += 1

            try:
                yield begins
            finally:
                bar.update(phases - bar.n)  # a notebook's stays, and is red, where it is not full


def callers_level() -> int:
    """The `stacklevel` of the first frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    inside = (PACKAGE, torch.__path__[0])
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


@functools.cache
def warn_once(text: str) -> None:
    """Once in a process, as :meth:`Log.warn_once`."""
    if _is_kept():
        LOGGER.warning(text)
    if _RANKS.all_ranks or rank() == 0:
        warnings.warn(text, stacklevel=callers_level())
