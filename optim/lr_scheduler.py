"""Says how the learning rate of ORTTrainer goes up in the first steps, and down after them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from ortmodule.core.errors import ArgumentError


class WarmupLRScheduler(ABC):
    """What the schedulers have in common: the rate goes up linearly from 0 over the first steps.

    ``total_steps``: updates of the weights in the whole training. ``warmup``: the part of them in which it goes up.

    Raises ValueError for a number that is out of its range.
    """

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        if not total_steps >= 1:
            raise ArgumentError(f"total_steps must be 1 or more, not {total_steps}")
        if not 0 <= warmup < 1:
            raise ArgumentError(f"warmup is a part of all steps, from 0 to below 1, not {warmup}")
        self.total_steps, self.warmup = total_steps, warmup
        self._warmup_steps = warmup * total_steps
        self._last: list[float] = []

    @abstractmethod
    def _after(self, part: float, lr: float) -> float:
        """The factor when ``part`` of the steps after the warm-up is over; ``lr``: what it is multiplied with."""

    def get_lr(self, train_step_info: Any) -> list[float]:
        """The learning rate of the update that comes after ``train_step_info.optimization_step`` others, alone in a
        list."""
        step, lr = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if step < self._warmup_steps:
            return [lr * step / max(1.0, self._warmup_steps)]
        rest = max(1.0, self.total_steps - self._warmup_steps)
        return [lr * self._after(min(1.0, (step - self._warmup_steps) / rest), lr)]

    def _step(self, train_step_info: Any) -> list[float]:
        self._last = self.get_lr(train_step_info)
        return self._last

    def get_last_lr(self) -> list[float]:
        """What the latest update had; empty before the first."""
        return self._last


class ConstantWarmupLRScheduler(WarmupLRScheduler):
    """After the warm-up the rate stays as it is."""

    def _after(self, part: float, lr: float) -> float:
        return 1.0


class LinearWarmupLRScheduler(WarmupLRScheduler):
    """After the warm-up the rate goes down linearly, to 0."""

    def _after(self, part: float, lr: float) -> float:
        return 1.0 - part


class CosineWarmupLRScheduler(WarmupLRScheduler):
    """After the warm-up the rate follows a cosine, ``cycles`` waves of it: with 0.5 it goes down to 0."""

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ArgumentError(f"cycles must be above 0, not {cycles}")
        self.cycles = cycles

    def _after(self, part: float, lr: float) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * self.cycles * 2.0 * part)))


class PolyWarmupLRScheduler(WarmupLRScheduler):
    """After the warm-up the rate goes down to ``lr_end`` as a power of the part that is left.

    Raises ValueError, when it is used, for a learning rate that is not above ``lr_end``.
    """

    def __init__(self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not lr_end >= 0 or not power >= 0:
            raise ArgumentError(f"lr_end and power must not be below 0: not {lr_end} and {power}")
        self.lr_end, self.power = lr_end, power

    def _after(self, part: float, lr: float) -> float:
        if not lr > self.lr_end:
            raise ArgumentError(f"the learning rate {lr} is not above lr_end, {self.lr_end}")
        return ((lr - self.lr_end) * (1.0 - part) ** self.power + self.lr_end) / lr
