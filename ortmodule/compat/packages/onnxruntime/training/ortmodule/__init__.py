"""Stands for `onnxruntime.training.ortmodule`, which is ortmodule."""

from ortmodule import DebugOptions, LogLevel, ORTModule

__all__ = ["DebugOptions", "LogLevel", "ORTModule"]
