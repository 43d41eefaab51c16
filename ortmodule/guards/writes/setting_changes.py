"""Tells whether forward changes a setting of its thread or process, and puts it back.

A graph repeats no such change (`torch.set_grad_enabled(False)`, `torch.set_num_threads(1)`, `os.environ["A"] = "1"`),
so a module that leaves a setting other than it was is PyTorch's. A trace that ends with an error in between leaves it
as well, and the next one would begin with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ortmodule.core import devices
from ortmodule.core.errors import NotTraceable
from ortmodule.core.snapshot import Snapshot


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(mode: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*mode)


def _autocast() -> tuple[devices.Autocast, bool]:
    return devices.autocast(), torch.is_autocast_cache_enabled()


def _set_autocast(mode: tuple[devices.Autocast, bool]) -> None:
    kinds, cached = mode
    for kind, (enabled, dtype) in zip(devices.TYPES, kinds, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cached)


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _backends() -> tuple[bool, ...]:
    return tuple(getattr(owner, name) for owner, name in _OF_BACKENDS)


def _set_backends(values: tuple[bool, ...]) -> None:
    for (owner, name), value in zip(_OF_BACKENDS, values, strict=True):
        if getattr(owner, name) == value:
            continue
        if flag := vars(type(owner)).get(name):
            flag.setter(value)  # the flag itself refuses once `torch.backends.disable_global_flags` was called
        else:
            setattr(owner, name, value)


_cudnn: Any = torch.backends.cudnn
_OF_BACKENDS = [
    *((_cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.mkldnn, "enabled"),
]
#: What a message calls it -> what it is, and what sets it. The precision of products sets what torch.backends tells,
#: and cannot be asked for while these say something else: it comes first.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "whether autograd records (torch.set_grad_enabled)": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the default type": (torch.get_default_dtype, torch.set_default_dtype),
    "autocast": (_autocast, _set_autocast),
    "the precision of products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether algorithms are deterministic": (_deterministic, _set_deterministic),
    "whether autograd looks for anomalies": (_anomaly, _set_anomaly),
    "a setting of torch.backends": (_backends, _set_backends),
    "the working directory": (os.getcwd, os.chdir),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "an environment variable": (lambda: dict(os.environ), _set_environment),
}


class _Held:
    """What a setting is. Modules that are imported may set environment variables: these stay, as no module is imported
    a second time."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._get, self._put, self._then = get, put, get()
        self._modules = len(sys.modules)

    def changed(self) -> bool:
        imports = self._put is _set_environment and len(sys.modules) > self._modules
        return not imports and self._get() != self._then

    def put_back(self) -> None:
        if self.changed():
            self._put(self._then)


@contextmanager
def settings_left_alone() -> Iterator[None]:
    """Puts back what is another one at the end. Raises NotTraceable then, unless something else has failed."""
    settings = Snapshot()
    for name, (get, put) in reversed(_SETTINGS.items()):  # the first is put back first
        with suppress(OSError, RuntimeError):  # a directory that is gone, a setting that this build has not
            settings.add_named(name, _Held(get, put))
    with settings.around():
        yield
        if changed := list(settings.all_changed()):
            raise NotTraceable(f"forward changes {changed[-1][0]}, which a graph does not")
