"""Trains with one call a step, for scripts of ONNX Runtime's first training API."""

from ortmodule.trainer.options import ORTTrainerOptions
from ortmodule.trainer.trainer import ORTTrainer, TrainStepInfo

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]
