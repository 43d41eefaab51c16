"""Stands for `onnxruntime.training`, which is ortmodule."""

import importlib
from typing import Any

_OF_TRAINER = ("ORTTrainer", "ORTTrainerOptions", "TrainStepInfo")
_PACKAGES = ("amp", "optim", "ortmodule")  # after `import onnxruntime.training` scripts read them as attributes
__all__ = [
    "DebugOptions",
    "LogLevel",
    "ORTModule",
    "ORTTrainer",
    "ORTTrainerOptions",
    "TrainStepInfo",
    "amp",
    "optim",
    "set_seed",
]


def __getattr__(name: str) -> Any:
    if name == "set_seed":
        return importlib.import_module("ortmodule.compat.seed").set_seed
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        return getattr(importlib.import_module("ortmodule.trainer" if name in _OF_TRAINER else "ortmodule"), name)
    raise AttributeError(f"onnxruntime.training.{name} is not here: this is ortmodule's stand-in")
