"""Steps Adagrad in one pass over the memory of all tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ortmodule.optim.fused import FusedOptimizer, check_numbers, fill_step


class FusedAdagrad(FusedOptimizer):
    """`torch.optim.Adagrad` (Duchi, Hazan and Singer, 2011), all tensors in one pass over memory.

    A state dict of either can be loaded into the other.

    Args:
        params: parameters or groups of them; float32, float64, bfloat16 or float16, each group on the CPU or on a GPU.
        lr: learning rate, a number or a tensor of one.
        lr_decay: the learning rate is divided by 1 + (step - 1) lr_decay.
        weight_decay: this times the weight is added to the gradient.
        initial_accumulator_value: where the sums of squared gradients begin.
        eps: added to the denominator.
        maximize: go up instead of down.
        set_grad_none: what :meth:`zero_grad` does by default: set gradients to None, or fill them with zeros.
        master_weights: keep float32 weights, and float32 states, for 16-bit parameters.

    Raises:
        ValueError: a setting is out of its range, or there are no parameters.
        TypeError: a parameter is not of a float type, or a setting no number.
    """

    _rule = "adagrad"
    _states = ("sum",)
    _needed = ("step", "sum")
    _group_needs = ("lr", "lr_decay")

    def __init__(
        self, params: Iterable, lr: float | torch.Tensor = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False,
        set_grad_none: bool = True, master_weights: bool = False,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "eps": eps, "maximize": maximize,
            "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none)
        with torch.no_grad():  # PyTorch's class takes no state dict without them
            for group in self.param_groups:
                for p in group["params"]:
                    self._state_of(p, group)

    def _check_settings(self, group: dict[str, Any]) -> None:
        names = {"lr_decay": "learning rate's decay", "weight_decay": "weight decay", "eps": "eps"}
        check_numbers(group, lr="learning rate", initial_accumulator_value="initial accumulator value", **names)

    def _fill(self, state: dict[str, Any], param: torch.Tensor, dtype: torch.dtype, group: dict[str, Any]) -> None:
        fill_step(state, param)
        if "sum" not in state:
            state["sum"] = torch.full_like(param, float(group["initial_accumulator_value"]), dtype=dtype).detach()

    def _settings(self, group: dict[str, Any], first: bool) -> tuple[float, ...]:
        return tuple(float(group[name]) for name in ("lr", "lr_decay", "weight_decay", "eps"))
