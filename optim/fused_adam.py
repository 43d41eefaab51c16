"""Steps Adam in one pass over the memory of all tensors."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import torch

from ortmodule.core.errors import ArgumentError
from ortmodule.optim.fused import FusedOptimizer, check_betas, check_numbers, fill_step, fill_zeros


class AdamWMode(IntEnum):
    """Where the weights decay."""

    ADAM_L2_REGULARIZATION = 0  #: in the gradient, as `torch.optim.Adam`
    ADAMW_TRANSFORMERS = 1  #: in the weight after the update, as the AdamW that transformers had
    ADAMW_TORCH = 2  #: in the weight before the update, as `torch.optim.AdamW`


class FusedAdam(FusedOptimizer):
    """Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), all tensors in one pass over memory.

    A ``torch.optim.Optimizer``: groups, closures, hooks, schedulers and `GradScaler` work as with `torch.optim.AdamW`,
    and a state dict of either can be loaded into the other.

    Args:
        params: parameters or groups of them; float32, float64, bfloat16 or float16, each group on the CPU or on a GPU.
        lr: learning rate, a number or a tensor of one.
        bias_correction: divide the running means by 1 - beta^step.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: an :class:`AdamWMode` or its number.
        weight_decay: the decay, see :class:`AdamWMode`.
        set_grad_none: what :meth:`zero_grad` does by default: set gradients to None, or fill them with zeros.
        amsgrad: use the largest second moment so far (Reddi, Kale and Kumar, 2018).
        maximize: go up instead of down.
        master_weights: keep float32 weights, and float32 states, for 16-bit parameters.

    Raises:
        ValueError: a setting is out of its range, or there are no parameters.
        TypeError: a parameter is not of a float type, or a setting no number.
    """

    _rule = "adam"
    _states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _needed = ("step", "exp_avg", "exp_avg_sq")
    _group_needs = ("lr", "betas")

    def __init__(
        self, params: Iterable, lr: float | torch.Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        adam_w_mode: int = AdamWMode.ADAMW_TRANSFORMERS, weight_decay: float = 0.0, set_grad_none: bool = True, *,
        amsgrad: bool = False, maximize: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "adam_w_mode": adam_w_mode,
            "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize, "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none)

    def _check_settings(self, group: dict[str, Any]) -> None:
        check_numbers(group, lr="learning rate", eps="eps", weight_decay="weight decay")
        check_betas(group)
        mode = group["adam_w_mode"]
        if mode not in list(AdamWMode):
            raise ArgumentError(f"adam_w_mode must be one of {[mode.value for mode in AdamWMode]}, not {mode}")
        group["adam_w_mode"] = int(mode)  # torch.load(weights_only=True) takes no classes of ours

    def _used(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._states if group["amsgrad"] else self._states[:2]

    def _fill(self, state: dict[str, Any], param: torch.Tensor, dtype: torch.dtype, group: dict[str, Any]) -> None:
        fill_step(state, param)
        fill_zeros(state, param, dtype, "exp_avg", "exp_avg_sq")
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()

    def _settings(self, group: dict[str, Any], first: bool) -> tuple[float, ...]:
        return (
            int(group["adam_w_mode"]), float(group["lr"]), *map(float, group["betas"]), float(group["eps"]),
            float(group["weight_decay"]), bool(group["bias_correction"]),
        )  # fmt: skip
