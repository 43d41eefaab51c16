"""Trains PyTorch modules through a C engine: `model = ORTModule(model)`."""

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (the engine finds torch's library in the process)

try:
    from ortmodule._core import EngineError, Error, InvalidModelError, UnsupportedError
except ImportError as error:
    from ortmodule.not_built import sentence

    raise ImportError(sentence(error), name="ortmodule._core") from error

from ortmodule import memory
from ortmodule.capture import patterns
from ortmodule.core.config import Config, DebugOptions
from ortmodule.core.errors import (
    ArgumentError,
    ArgumentTypeError,
    BypassError,
    ExistingFileError,
    FileError,
    MissingFileError,
    MissingPackageError,
    NotAFolderError,
    NotWritableError,
    OutOfMemoryError,
    SettingError,
    StateError,
    UnknownNameError,
)
from ortmodule.core.logger import LogLevel
from ortmodule.core.names import VERSION as __version__
from ortmodule.debug.explain import Report, VariantReport, explain
from ortmodule.debug.layers import LayerReport
from ortmodule.debug.profile import NodeTime, Profile, profile
from ortmodule.debug.report import report
from ortmodule.module import ORTModule
from ortmodule.with_loss import ModuleWithLoss

if TYPE_CHECKING:
    from ortmodule.trainer import ORTTrainer, ORTTrainerOptions

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BypassError",
    "Config",
    "DebugOptions",
    "EngineError",
    "Error",
    "ExistingFileError",
    "FileError",
    "InvalidModelError",
    "LayerReport",
    "LogLevel",
    "MissingFileError",
    "MissingPackageError",
    "ModuleWithLoss",
    "NodeTime",
    "NotAFolderError",
    "NotWritableError",
    "ORTModule",
    "ORTTrainer",
    "ORTTrainerOptions",
    "OutOfMemoryError",
    "Profile",
    "Report",
    "SettingError",
    "StateError",
    "UnknownNameError",
    "UnsupportedError",
    "VariantReport",
    "__version__",
    "explain",
    "memory",
    "patterns",
    "profile",
    "report",
]


def __getattr__(name: str) -> Any:
    """ORTTrainer, and the optimizers that it has, are imported by scripts that use it."""
    if name in ("ORTTrainer", "ORTTrainerOptions"):
        from ortmodule import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module ortmodule has no attribute {name}")
