"""`model = ORTModule(model)`: PyTorch modules train through a C engine."""

from importlib.metadata import PackageNotFoundError, version

import torch  # noqa: F401  (the engine finds torch's library in the process)

try:
    from ortmodule._core import Error, InvalidModelError, UnsupportedError
except ImportError as error:
    from ortmodule.not_built import sentence

    raise ImportError(sentence(error), name="ortmodule._core") from error

from ortmodule import patterns
from ortmodule.explain import Report, explain
from ortmodule.module import ORTModule
from ortmodule.options import DebugOptions, LogLevel
from ortmodule.with_loss import ModuleWithLoss

try:
    __version__ = version("ortmodule")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0.0.0"

__all__ = [
    "DebugOptions",
    "Error",
    "InvalidModelError",
    "LogLevel",
    "ModuleWithLoss",
    "ORTModule",
    "Report",
    "UnsupportedError",
    "explain",
    "patterns",
]
