"""Steps stochastic gradient descent in one pass over the memory of all tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ortmodule.core.errors import ArgumentError
from ortmodule.optim.fused import FusedOptimizer, check_numbers, fill_step, fill_zeros


class FusedSGD(FusedOptimizer):
    """`torch.optim.SGD`, all tensors in one pass over memory; a state dict of either can be loaded into the other.

    Args:
        params: parameters or groups of them; float32, float64, bfloat16 or float16, each group on the CPU or on a GPU.
        lr: learning rate, a number or a tensor of one.
        momentum: how much of the last direction is kept; 0 keeps no state.
        dampening: how much less than 1 a gradient adds to the momentum, from its second step on.
        weight_decay: this times the weight is added to the gradient.
        nesterov: look ahead along the momentum; needs a momentum, and no dampening.
        maximize: go up instead of down.
        set_grad_none: what :meth:`zero_grad` does by default: set gradients to None, or fill them with zeros.
        master_weights: keep float32 weights, and float32 states, for 16-bit parameters.

    Raises:
        ValueError: a setting is out of its range, or there are no parameters.
        TypeError: a parameter is not of a float type, or a setting no number.
    """

    _rule = "sgd"
    _states = ("momentum_buffer",)
    _needed = ()
    _group_needs = ("lr", "momentum", "dampening", "nesterov")

    def __init__(
        self, params: Iterable, lr: float | torch.Tensor = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False, set_grad_none: bool = True,
        master_weights: bool = False,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "master_weights": master_weights,
        }  # fmt: skip
        super().__init__(params, defaults, set_grad_none)

    def _check_settings(self, group: dict[str, Any]) -> None:
        names = {"momentum": "momentum", "dampening": "dampening", "weight_decay": "weight decay"}
        check_numbers(group, lr="learning rate", **names)
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ArgumentError("nesterov needs a momentum above 0, and a dampening of 0")

    def _used(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._states if group["momentum"] != 0 else ()

    def _fill(self, state: dict[str, Any], param: torch.Tensor, dtype: torch.dtype, group: dict[str, Any]) -> None:
        if group["momentum"] != 0 and group["dampening"] != 0 and self._gpu(param):
            # An overflow there may leave the first step out: the host does not know which is the first.
            state.setdefault("step", 0.0 if state.get("momentum_buffer") is None else 1.0)
            fill_step(state, param)
        fill_zeros(state, param, dtype, *self._used(group))

    def _settings(self, group: dict[str, Any], first: bool) -> tuple[float, ...]:
        dampening = 0.0 if first else float(group["dampening"])
        return (
            float(group["lr"]), float(group["momentum"]), dampening, float(group["weight_decay"]),
            bool(group["nesterov"]),
        )  # fmt: skip
