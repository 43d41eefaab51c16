"""Steps LAMB in two passes over the memory of all tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ortmodule.optim.fused import FusedOptimizer, check_betas, check_numbers, fill_step, fill_zeros


class FusedLamb(FusedOptimizer):
    """LAMB (You et al., 2020, algorithm 2): Adam's direction, as long as the learning rate times the weights' norm.

    The direction, with the weights times ``weight_decay`` added, is scaled by the norm of its whole tensor over its
    own; by 1 where either is 0. :meth:`clip_grad_norm` clips beforehand, as implementations for large batches do.

    Args:
        params: parameters or groups of them; float32, float64, bfloat16 or float16, each group on the CPU or on a GPU.
        lr: learning rate, a number or a tensor of one.
        bias_correction: divide the running means by 1 - beta^step.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: this times the weight is added to the direction.
        set_grad_none: what :meth:`zero_grad` does by default: set gradients to None, or fill them with zeros.
        maximize: go up instead of down.
        master_weights: keep float32 weights, and float32 states, for 16-bit parameters.

    Raises:
        ValueError: a setting is out of its range, there are no parameters, or they are shards (DTensor).
        TypeError: a parameter is not of a float type, or a setting no number.
    """

    _rule = "lamb"
    _states = ("exp_avg", "exp_avg_sq")
    _needed = ("step", "exp_avg", "exp_avg_sq")
    _group_needs = ("lr", "betas")
    _takes_shards = False
    _measures = True

    def __init__(
        self, params: Iterable, lr: float | torch.Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0,
        set_grad_none: bool = True, *, maximize: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "maximize": maximize, "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none)

    def _check_settings(self, group: dict[str, Any]) -> None:
        check_numbers(group, lr="learning rate", eps="eps", weight_decay="weight decay")
        check_betas(group)

    def _fill(self, state: dict[str, Any], param: torch.Tensor, dtype: torch.dtype, group: dict[str, Any]) -> None:
        fill_step(state, param)
        fill_zeros(state, param, dtype, *self._states)

    def _settings(self, group: dict[str, Any], first: bool) -> tuple[float, ...]:
        return (
            float(group["lr"]), *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]),
            bool(group["bias_correction"]),
        )  # fmt: skip
