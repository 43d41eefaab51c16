"""Stands for `onnxruntime.training.amp`, whose loss scalers are those of `ortmodule.optim`."""

from ortmodule.optim import DynamicLossScaler
from ortmodule.optim import StaticLossScaler as LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
