"""Stands for `onnxruntime.training.optim.lr_scheduler`, which is `ortmodule.optim.lr_scheduler`."""

from ortmodule.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)

__all__ = [
    "ConstantWarmupLRScheduler", "CosineWarmupLRScheduler", "LinearWarmupLRScheduler", "PolyWarmupLRScheduler",
]  # fmt: skip
