"""Names the functions that tell forward something of its process: those that guards call again, those that are refused.

Settings (`torch.get_num_threads()`, `torch.backends.cudnn.enabled`, `os.getcwd()`, the level of a logger) are called
again before each run, and compared. Of files, other processes and what changes by itself a graph cannot know: what asks
for them is left to PyTorch.
"""

from __future__ import annotations

import builtins
import gc
import inspect
import io
import locale
import logging
import os
import platform
import re
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch

from ortmodule.capture.scalar_guards import active, user_line
from ortmodule.core.errors import NotTraceable
from ortmodule.core.names import PACKAGE
from ortmodule.core.objects.interception import Replacement, replaced
from ortmodule.core.torch_private import functions_of_c
from ortmodule.guards.code_reader import is_library, module_of
from ortmodule.guards.process_state import Setting, of_setting

#: A part of every call's key, or a matter of the trace.
_IN_KEY = {
    "get_default_dtype", "get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype", "is_grad_enabled",
    "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled", "_get_tracing_state", "_is_tracing",
    "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "_is_any_autocast_enabled",
}  # fmt: skip
_TELLS = re.compile(r"_?(get|is|are|has)_")


def _named(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split() if hasattr(owner, name)]


#: Of C code, without arguments.
SETTINGS = {f for f in functions_of_c() if _TELLS.match(f.__name__) and f.__name__ not in _IN_KEY}
SETTINGS |= {
    *_named(
        os, "getcwd getcwdb getpid getppid getuid geteuid getgid getegid getlogin cpu_count uname get_terminal_size"
    ),
    *_named(sys, "getrecursionlimit getdefaultencoding getfilesystemencoding getswitchinterval get_int_max_str_digits"),
    *_named(threading, "get_ident get_native_id"),
    *_named(socket, "gethostname"),
}
#: What changes by itself, or in a trace.
_STATISTICS = {"_cuda_memoryStats", "_cuda_memorySnapshot", "_accelerator_getDeviceStats", "_accelerator_getMemoryInfo"}
MOVING = {
    *(f for f in functions_of_c() if f.__name__ in _STATISTICS),
    *_named(os, "getloadavg times"),
    *_named(gc, "isenabled get_count get_stats get_threshold"),
}
#: Of the file system, and of other processes.
FILES = {*_named(os, "stat lstat listdir scandir access readlink open walk statvfs fork posix_spawn popen system")}


def _codes(functions: Iterable[Any]) -> dict[types.CodeType, Callable[..., Any]]:
    return {f.__code__: f for f in map(inspect.unwrap, functions) if isinstance(f, types.FunctionType)}


def _level(logger: logging.Logger) -> tuple[int, int, bool]:
    """What decides whether something is logged."""
    return logger.getEffectiveLevel(), logger.manager.disable, logger.disabled


def _level_of(name: str | None) -> tuple[int, int, bool]:
    return _level(logging.getLogger(name))


#: Of Python code, with the arguments that forward gives.
_FUNCTIONS = _codes(
    [
        *_named(torch, "get_default_device get_deterministic_debug_mode"),
        *_named(torch.distributed, "is_initialized get_rank get_world_size get_backend is_torchelastic_launched"),
        *_named(torch.multiprocessing, "get_sharing_strategy"),
        *_named(torch.utils.data, "get_worker_info"),
        *_named(locale, "getlocale getpreferredencoding localeconv"),
        *_named(platform, "node machine system platform python_version"),
        *_named(threading, "active_count"),
        *_named(numpy, "geterr get_printoptions"),
    ]
)


def _thread() -> tuple[str, int | None]:
    """What tells a thread from others."""
    thread = threading.current_thread()
    return thread.name, thread.ident


_FUNCTIONS[threading.current_thread.__code__] = _thread
_LOGGERS: dict[types.CodeType, Callable[..., Any]] = {
    f.__code__: _level for f in (logging.Logger.isEnabledFor, logging.Logger.getEffectiveLevel)
}
_LOGGERS |= {logging.getLogger.__code__: _level_of}
CODES = {*_FUNCTIONS, *_LOGGERS}

_TORCH = torch.__path__[0]
#: Parts of torch in which a function that forward calls asks for a setting.
_OF_SETTINGS = tuple(
    os.path.join(_TORCH, name)
    for name in ("__init__.py", "backends", "cpu", "cuda", "amp", "random.py", f"utils{os.sep}deterministic.py")
)
#: They read files, or ask for settings, for themselves.
_THEIR_OWN = {
    "importlib", "linecache", "tokenize", "inspect", "traceback", "warnings", "logging", "tempfile", "multiprocessing",
    "threading", "concurrent", "zipimport", "pkgutil",
}  # fmt: skip


def asks_setting(frame: types.FrameType) -> types.FrameType | None:
    """The frame of a user's, or of another library's, that asks for a setting by what ``frame`` does."""
    step: types.FrameType | None = frame
    while step is not None and step.f_code.co_filename.startswith(_OF_SETTINGS):
        step = step.f_back
    if step is None or step.f_code.co_filename.startswith((_TORCH, PACKAGE)) or _top(step) in _THEIR_OWN:
        return None
    return step


def asks_files(frame: types.FrameType) -> types.FrameType | None:
    """The frame of a user's for whom ``frame`` reads a file."""
    step: types.FrameType | None = frame
    while step is not None:
        file = step.f_code.co_filename
        if file.startswith((_TORCH, PACKAGE, "<frozen importlib")) or _top(step) in _THEIR_OWN:
            return None
        if not is_library(module_of(step.f_globals)):
            return step
        step = step.f_back
    return None


def _top(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def setting_of_code(frame: types.FrameType) -> Setting | None:
    """What a function of :data:`CODES` that begins is asked for, if it can be asked for again."""
    code, given = frame.f_code, frame.f_locals
    args = tuple(given[name] for name in code.co_varnames[: code.co_argcount])
    try:
        if code in _LOGGERS:
            return of_setting(_LOGGERS[code], args[:1])
        return of_setting(_FUNCTIONS[code], args)
    except TypeError:
        return None


def without_files() -> AbstractContextManager[None]:
    """Inside, what opens a file to read from it raises NotTraceable, in a trace."""
    return replaced([Replacement.around(owner, "open", _opening) for owner in (builtins, io)])


def _opening(original: Callable) -> Callable:
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if active() is not None and "r" in str(mode) and (frame := asks_files(sys._getframe(1))) is not None:
            raise NotTraceable(f"{user_line(frame)} reads a file: a graph would have the same one at each call")
        return original(file, mode, *args, **kwargs)

    return open_file


def asked_moving(function: Any, frame: types.FrameType) -> Iterator[tuple[types.FrameType, str]]:
    """The frame for which a function of :data:`MOVING` or :data:`FILES` is called, and what it does."""
    if function in MOVING and (step := asks_setting(frame)) is not None:
        yield step, "asks for what changes by itself"
    elif function in FILES and (step := asks_files(frame)) is not None:
        yield step, "reads the file system, or starts a process"
