"""Optimizers that run through the engine; installed as ``ortmodule.optim``."""

from ortmodule.optim.fused_adam import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FusedAdam"]
