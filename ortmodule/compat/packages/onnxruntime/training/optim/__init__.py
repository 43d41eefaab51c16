"""Stands for `onnxruntime.training.optim`, which is `ortmodule.optim`."""

from ortmodule.optim import AdamWMode, DynamicLossScaler, FP16_Optimizer, FusedAdam, StaticLossScaler

__all__ = ["AdamWMode", "DynamicLossScaler", "FP16_Optimizer", "FusedAdam", "StaticLossScaler"]
