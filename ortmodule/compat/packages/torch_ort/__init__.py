"""Stands for `torch_ort`, which is ortmodule."""

from ortmodule import DebugOptions, LogLevel, ORTModule
from ortmodule.compat.seed import set_seed

__all__ = ["DebugOptions", "LogLevel", "ORTModule", "set_seed"]
