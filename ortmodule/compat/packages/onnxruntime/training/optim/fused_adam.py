"""Stands for `onnxruntime.training.optim.fused_adam`, which is `ortmodule.optim.fused_adam`."""

from ortmodule.optim.fused_adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FusedAdam"]
