"""Stands for `onnxruntime.training.optim.fp16_optimizer`, which is `ortmodule.optim.fp16_optimizer`."""

from ortmodule.optim.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
