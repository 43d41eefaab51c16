"""Stands for `onnxruntime.training`, which is ortmodule."""

from ortmodule.trainer import ORTTrainer, ORTTrainerOptions, TrainStepInfo

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]
