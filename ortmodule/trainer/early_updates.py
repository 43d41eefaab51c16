"""Updates weights while backward goes on, so that their gradients need not wait for its end."""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.engine.memory_goal import SEGMENT_BYTES


class EarlyUpdates:
    """Steps ``optimizer`` as soon as so many bytes of gradients are complete, and drops these.

    The engine hands gradients over in segments where parameters have hooks, and lets a hook change a weight that
    backward has read for the last time (docs/architecture/distributed.md). The updates are those of one step at the
    end: the rules of these optimizers look at one parameter at a time.

    An error in the middle of backward leaves the weights whose gradients were complete updated.
    """

    def __init__(self, optimizer: Any, segment: int = SEGMENT_BYTES) -> None:
        self._optimizer, self._segment, self._bytes = optimizer, segment, 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._made)

    def _made(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._bytes += parameter.grad.nbytes
        if self._bytes >= self._segment:
            self.step()

    def step(self) -> None:
        """With the gradients that are there."""
        self._bytes = 0
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
