"""Puts off the logits beside a loss until the script reads them.

Models return their logits beside the loss, and a training step reads the loss alone. So what a module gives back for
them is a :class:`Deferred`: to the script a tensor, with the values of its own forward whenever it is read, and with
gradients. They are computed from hidden states that were kept, and the head's weights. The weights may change before
the logits are read: an optimizer's step makes a copy first. A digest of the weights finds any other change, which is an
exception: logits never come from other weights than those of their forward.

A call site that reads its logits gets them computed with everything else from then on (:class:`Deferral`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ortmodule import _core
from ortmodule.core import torch_private
from ortmodule.core.dtypes import DTYPES
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.engine.session import Session
from ortmodule.runtime.lm_head import Head, find_head, without_head

#: Calls whose logits were not read, before they are deferred.
WATCHED = 2
#: Weights of a head for which it is worth while.
LEAST_WEIGHTS = 1 << 20
#: Logits of one call site that wait at an optimizer's step: more are a collection, which the script will read.
MOST_WAITING = 2
#: Passes that leave something out where only the loss reads the logits.
GAINS = ("label_sparsity", "linear_loss", "padding_removal")


class Deferral:
    """What becomes of the logits of one graph: they are watched, then deferred, or computed since the script reads
    them."""

    def __init__(self, head: Head, index: int, model: Any, forced: bool, session: Callable[[bytes], Session]) -> None:
        """``index``: of the output. ``forced``: without watching first, and gains or none. ``session``: of a graph."""
        self.head, self.index, self.forced = head, index, forced
        self.touched, self._calls = False, WATCHED if forced else 0
        self._make = functools.partial(_made, model, head, session)

    @functools.cached_property
    def session(self) -> Session:
        """The graph with the hidden states for the logits."""
        return self._make()

    def sessions(self) -> list[Session]:
        """Those that were made."""
        return [self.session] if "session" in vars(self) else []

    def pays(self, fired: dict[str, int]) -> bool:
        """``fired``: passes, by name, that changed a plan."""
        return self.forced or any(name in fired for name in GAINS)

    def waits(self) -> bool:
        """Have the logits not been read for long enough?"""
        return self._calls >= WATCHED and not self.touched

    def watched(self, logits: torch.Tensor) -> torch.Tensor:
        """Computed logits; a read of them is noted."""
        if self.touched:
            return logits
        self._calls += 1
        return Deferred(_Computed(self, logits), logits.dtype, logits.shape)

    def deferred(self, hidden: torch.Tensor, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits that are computed when the script reads them. ``feeds``: what the graph was fed, by name."""
        weights = [feeds[name].detach() for name in self.head.weights]
        return Deferred(_Waiting(self, hidden, weights), *self.head.like(hidden, weights))


def _made(model: Any, head: Head, session: Callable[[bytes], Session]) -> Session:
    return session(without_head(model, head))


def deferral_of(
    model: Any, outputs: Sequence[str], candidates: Sequence[int], written: Collection[str],
    tensors: dict[str, torch.Tensor], setting: str, session: Callable[[bytes], Session],
) -> Deferral | None:  # fmt: skip
    """How logits among the ``candidates`` can be deferred: indices of ``outputs``, names; None: there are none.

    ``written``: inputs that forward changes. ``tensors``: the graph's inputs. ``setting``: of DEFER_LOGITS.
    """
    if setting == "0" or torch_private.missing(torch_private.LOGITS):
        return None
    for index in candidates:
        head = find_head(model, outputs[index], written)
        if head is None or head.hidden in outputs or outputs.count(outputs[index]) > 1:
            continue
        if setting == "auto" and sum(tensors[name].numel() for name in head.weights) < LEAST_WEIGHTS:
            continue
        return Deferral(head, index, model, setting == "1", session)
    return None


# --- where the values come from ---------------------------------------------------------------------------------------


class _Computed:
    """Logits that are computed already."""

    def __init__(self, deferral: Deferral, values: torch.Tensor) -> None:
        self.deferral, self._values = deferral, values

    def values(self) -> torch.Tensor:
        self.deferral.touched = True
        return self._values


class _Waiting:
    """Hidden states, and the weights that they are multiplied by when the logits are read."""

    def __init__(self, deferral: Deferral, hidden: torch.Tensor, weights: list[torch.Tensor]) -> None:
        self.deferral, self.hidden, self.weights = deferral, hidden, weights
        self.digests = [_core.digest(weight) for weight in weights]
        self.copied = False
        self._values: torch.Tensor | None = None
        self._lock = threading.Lock()
        _waiting.add(self)

    def values(self) -> torch.Tensor:
        with self._lock:
            self.deferral.touched = True
            if self._values is None:
                if [_core.digest(weight) for weight in self.weights] != self.digests:
                    raise RuntimeError(
                        "these logits were not computed in their forward, since the script had read none before, and "
                        "weights that they depend on have changed since, outside of an optimizer's step: read them "
                        "before, or set ORTMODULE_DEFER_LOGITS=0 (from now on this module computes them in forward)"
                    )
                self._values = self.deferral.head.compute(self.hidden, self.weights)
                del self.hidden
                self.weights = []
                _waiting.discard(self)
            return self._values

    def keep(self, copies: dict[int, torch.Tensor]) -> None:
        """The weights may change from now on. ``copies``: those that were made, by data pointer."""
        with self._lock:
            if self._values is None and not self.copied:
                self.copied = True
                self.weights = [_copied(weight, copies) for weight in self.weights]


def _copied(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.data_ptr() not in copies:
        copies[tensor.data_ptr()] = _core.empty(torch.Tensor, DTYPES[tensor.dtype], tuple(tensor.shape)).copy_(tensor)
    return copies[tensor.data_ptr()]


_waiting: weakref.WeakSet[_Waiting] = weakref.WeakSet()


def _before_step(optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The weights change after this, or after each call of a closure, which may leave logits of its own."""
    _keep_weights()
    args = tuple(_kept_after(x) if callable(x) and x is not optimizer else x for x in args)
    return args, {name: _kept_after(x) if callable(x) else x for name, x in kwargs.items()}


def _kept_after(closure: Callable) -> Callable:
    @functools.wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        _keep_weights()
        return result

    return call


vars(_before_step)["reads_gradients"] = False  # (optim/zero.py)
#: From the beginning, since a step whose closure calls forward has begun when the first logits wait.
register_optimizer_step_pre_hook(_before_step)


def _keep_weights() -> None:
    if not _waiting:
        return
    copies: dict[int, torch.Tensor] = {}
    count: dict[Deferral, int] = {}
    with torch.no_grad():
        for waiting in list(_waiting):
            waiting.keep(copies)
            count[waiting.deferral] = count.get(waiting.deferral, 0) + 1
    for deferral, n in count.items():
        deferral.touched |= n > MOST_WAITING
