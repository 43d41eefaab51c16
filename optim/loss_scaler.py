"""Scales losses for scripts that do not: keeps float16 gradients from zero, leaves steps that overflow out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ortmodule.core.errors import ArgumentError, StateError
from ortmodule.core.torch_private import foreach_mul_
from ortmodule.optim.fused import FusedOptimizer
from ortmodule.optim.replace import fits, square_sums


class StaticLossScaler:
    """One factor for the loss, all the time.

    ::

        scaler.scale(loss).backward()
        scaler.step(optimizer)  # unscales; leaves the step out when a gradient is not finite

    With an optimizer of this package the gradients are read twice in all: for the check, and in the step, which
    unscales what it reads.

    Raises ValueError for a factor that is not above 0.
    """

    def __init__(self, loss_scale: float = 65536.0) -> None:
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ArgumentError(f"the loss scale must be a number above 0, not {loss_scale}")
        self.loss_scale = float(loss_scale)
        self._unscaled: dict[int, bool] = {}  # by optimizer, until its step: are its gradients finite?
        #: Makes one answer of those of all processes that have parts of a model.
        self.agree: Callable[[bool], bool] = bool

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor, in float32 at least."""
        return (loss if loss.dtype == torch.float64 else loss.float()) * self.loss_scale

    def unscale_(self, optimizer: Any) -> bool:
        """Divides the gradients by the factor, to clip them for instance; whether they are all finite.

        Raises RuntimeError when that was done already since the last step.
        """
        if id(optimizer) in self._unscaled:
            raise StateError("the gradients of this optimizer are unscaled already")
        gradients = _gradients(optimizer)
        self._unscaled[id(optimizer)] = finite = self.agree(_all_finite(gradients))
        if gradients:
            _multiply(gradients, 1.0 / self.loss_scale)
        return finite

    def step(self, optimizer: Any) -> bool:
        """Steps unless a gradient is infinite or NaN; whether it did."""
        finite = self._unscaled.pop(id(optimizer), None)
        if finite is None:
            gradients = _gradients(optimizer)
            finite = self.agree(_all_finite(gradients))
            if finite and isinstance(optimizer, FusedOptimizer):
                optimizer.scale_gradients(1.0 / self.loss_scale)
            elif finite and gradients:
                _multiply(gradients, 1.0 / self.loss_scale)
        if finite:
            optimizer.step()
        elif isinstance(optimizer, FusedOptimizer):
            optimizer.forget()
        self._stepped(finite)
        return finite

    def _stepped(self, finite: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_unscaled", "agree")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another kind of scaler."""
        if state.keys() != self.state_dict().keys():
            raise ArgumentError(f"this is not the state of a {type(self).__name__}: it has {sorted(state)}")
        vars(self).update(state)


class DynamicLossScaler(StaticLossScaler):
    """Halves the factor at every overflow, and doubles it after ``up_scale_window`` steps in a row without one.

    ``min_loss_scale``, ``max_loss_scale``: the factor stays between them. ``automatic_update``: every `step` counts;
    turn it off where one update of the model steps several optimizers, and call :meth:`update` once after them.

    Raises ValueError for limits that do not contain the factor, or a window below 1.
    """

    def __init__(
        self, automatic_update: bool = True, loss_scale: float = 65536.0, up_scale_window: int = 2000,
        min_loss_scale: float = 1.0, max_loss_scale: float = 2.0**24,
    ) -> None:  # fmt: skip
        super().__init__(loss_scale)
        if not 0 < min_loss_scale <= loss_scale <= max_loss_scale < math.inf:
            raise ArgumentError(f"the loss scale {loss_scale} is not between {min_loss_scale} and {max_loss_scale}")
        if up_scale_window < 1:
            raise ArgumentError(f"up_scale_window must be 1 or more, not {up_scale_window}")
        self.automatic_update, self.up_scale_window = automatic_update, up_scale_window
        self.min_loss_scale, self.max_loss_scale = min_loss_scale, max_loss_scale
        self._initial, self._stable_steps, self._finite = self.loss_scale, 0, True

    def _stepped(self, finite: bool) -> None:
        self._finite = self._finite and finite
        if self.automatic_update:
            self.update()

    def update(self) -> None:
        """Counts the steps since the last update as one."""
        if self._finite:
            self._stable_steps += 1
            if self._stable_steps >= self.up_scale_window:
                self.loss_scale, self._stable_steps = min(self.max_loss_scale, 2 * self.loss_scale), 0
        else:
            self.loss_scale, self._stable_steps = max(self.min_loss_scale, self.loss_scale / 2), 0
        self._finite = True

    def reset(self) -> None:
        """As it was made."""
        self.loss_scale, self._stable_steps, self._finite = self._initial, 0, True


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _multiply(gradients: list[Any], factor: float) -> None:
    """Of shards (DTensor) what this process has."""
    foreach_mul_([g.to_local() if hasattr(g, "to_local") else g for g in gradients], factor)


def _all_finite(gradients: list[torch.Tensor]) -> bool:
    if not fits(gradients):
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return all(bool(torch.isfinite(v).all()) for v in values)
    return all(bool(s.isfinite()) for s in square_sums(gradients))
