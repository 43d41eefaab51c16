"""Stands for `onnxruntime.training.optim`, which is `ortmodule.optim`."""

from ortmodule.optim import (
    AdamConfig,
    AdamWMode,
    DynamicLossScaler,
    FP16_Optimizer,
    FusedAdam,
    LambConfig,
    SGDConfig,
    StaticLossScaler,
    lr_scheduler,
)

__all__ = [
    "AdamConfig", "AdamWMode", "DynamicLossScaler", "FP16_Optimizer", "FusedAdam", "LambConfig", "SGDConfig",
    "StaticLossScaler", "lr_scheduler",
]  # fmt: skip
