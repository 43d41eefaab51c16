"""`torch_ort.optim`, which is `ortmodule.optim`."""

from ortmodule.optim import AdamWMode, FP16_Optimizer, FusedAdam

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam"]
