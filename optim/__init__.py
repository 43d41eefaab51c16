"""Steps optimizers in one pass over memory; installed as ``ortmodule.optim``."""

from ortmodule.optim import lr_scheduler
from ortmodule.optim.adasum import adasum_hook
from ortmodule.optim.config import AdamConfig, LambConfig, SGDConfig
from ortmodule.optim.fp16_optimizer import FP16_Optimizer
from ortmodule.optim.fused_adagrad import FusedAdagrad
from ortmodule.optim.fused_adam import AdamWMode, FusedAdam
from ortmodule.optim.fused_lamb import FusedLamb
from ortmodule.optim.fused_sgd import FusedSGD
from ortmodule.optim.loss_scaler import DynamicLossScaler, StaticLossScaler
from ortmodule.optim.zero import register

__all__ = [
    "AdamConfig", "AdamWMode", "DynamicLossScaler", "FP16_Optimizer", "FusedAdagrad", "FusedAdam", "FusedLamb",
    "FusedSGD", "LambConfig", "SGDConfig", "StaticLossScaler", "adasum_hook", "lr_scheduler",
]  # fmt: skip

register()
