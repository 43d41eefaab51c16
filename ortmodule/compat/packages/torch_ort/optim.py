"""`torch_ort.optim`, which is `ortmodule.optim`."""

from ortmodule.optim import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FusedAdam"]
