"""Optimizers in one pass over memory, and what belongs to their step; installed as ``ortmodule.optim``."""

from ortmodule.optim.fp16_optimizer import FP16_Optimizer
from ortmodule.optim.fused_adam import AdamWMode, FusedAdam
from ortmodule.optim.zero import register

__all__ = ["AdamWMode", "FP16_Optimizer", "FusedAdam"]

register()
