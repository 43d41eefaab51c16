"""Puts off the logits beside a loss until the script reads them.

Models return their logits beside the loss, and a training step reads the loss alone. So what a module gives back for
them is a :class:`Deferred`: to the script a tensor, with the values of its own forward whenever it is read, and with
gradients. They are computed from hidden states that were kept, and the head's weights, or by a forward that runs again:
then the results beside them (caches of keys and values, hidden states of layers) are put off in the same way. The
weights may change before they are read: an optimizer's step makes a copy first, or has them computed. A digest of the
weights finds any other change, which is an exception: logits never come from other weights than those of their forward.

A call site that reads its logits gets them computed with everything else from then on (:class:`Deferral`).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ortmodule.core import torch_private
from ortmodule.core.errors import StateError
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.engine.digests import Digests
from ortmodule.engine.memory_goal import Spec
from ortmodule.engine.session import Session, copied, gpu_of, is_captured
from ortmodule.runtime.calls import closures
from ortmodule.runtime.lm_head import Head, Heads, without_head, without_outputs

#: Calls whose logits were not read, before they are deferred.
WATCHED = 2
#: Weights of a head for which it is worth while.
LEAST_WEIGHTS = 1 << 20
#: Logits of one call site that wait at an optimizer's step: more are a collection, which the script will read.
MOST_WAITING = 2
#: Shapes of calls for which those of the logits are kept.
MOST_SPECS = 128
#: What a run leaves out: nothing; the head of the model; all that only the logits, and results beside them, need, so
#: that forward runs again for these.
NOTHING, HEAD, FORWARD = range(3)
#: Passes that leave something out where only the loss reads the logits, by what the run leaves out.
GAINS = {HEAD: ("label_sparsity", "linear_loss", "padding_removal"), FORWARD: ("padding_removal",)}
#: Logits whose memory is less than this part of the arena are no reason by themselves to leave the head out.
WORTH_IT = 16
#: Plans that leave out all that only the logits need, and gain nothing by that, before there are no more.
MOST_IN_VAIN = 4
#: Bytes of inputs that are copied for a forward that may run again.
MOST_COPIED = 16 << 20


class Deferral:
    """What becomes of the logits of one graph: they are watched, then deferred, or computed since the script reads
    them."""

    def __init__(
        self, head: Head, index: int, model: Any, forced: bool, session: Callable[[bytes], Session], repeats: bool,
        beside: dict[int, str],
    ) -> None:  # fmt: skip
        """``index``: of the output. ``forced``: without watching first, and gains or none. ``session``: of a graph.
        ``repeats``: forward may run again. ``beside``: other results that a run may leave out then, {output: name}."""
        self.head, self.index, self.forced = head, index, forced
        self.beside = tuple(beside)
        self.touched, self._calls = False, WATCHED if forced else 0
        self.most = FORWARD if repeats else HEAD
        self._in_vain: set[int] | None = set()  # plans for that which gain nothing; None: one does
        self._row_bytes = 0  # of the logits; 0: their memory is no reason to defer them
        self._make = {
            HEAD: lambda: session(without_head(model, head)),
            FORWARD: lambda: session(without_outputs(model, {head.logits, *beside.values()})),
        }
        self._sessions: dict[int, Session] = {}
        self._specs: dict[tuple, dict[int, tuple[torch.dtype, tuple[int, ...]]]] = {}

    def session(self, level: int) -> Session:
        """The graph that leaves so much out: hidden states are in place of the logits, or a number."""
        if level not in self._sessions:
            self._sessions[level] = self._make[level]()
        return self._sessions[level]

    def sessions(self) -> list[Session]:
        """Those that were made."""
        return list(self._sessions.values())

    def gains(self, level: int, plan: Any) -> bool:
        """Is this plan, which leaves so much out, worth it?"""
        if level == NOTHING or (level == HEAD and (self.forced or self._saves(plan))):
            return True
        return not (level == FORWARD and plan.writes) and any(name in plan.fired for name in GAINS[level])

    def _saves(self, plan: Any) -> bool:
        """Would the logits take much memory beside what such a run has?"""
        _, hidden = plan.outputs[self.index]
        return self._row_bytes * math.prod(hidden[:-1]) * WORTH_IT > plan.arena_bytes

    def note_copies(self) -> None:
        """Logits waited while an optimizer changed the head, whose weights were copied for them: that takes longer than
        to write the logits."""
        self._row_bytes = 0

    def pays(self, level: int, plan: Any) -> bool:
        """The same of a plan for a run. Where the first plans are not, no more are made."""
        gains = self.gains(level, plan)
        if level == FORWARD and self._in_vain is not None:
            self._in_vain = None if gains else self._in_vain | {id(plan)}
            if self._in_vain is not None and len(self._in_vain) >= MOST_IN_VAIN:
                self.most = min(self.most, HEAD)
        return gains

    def level(self, grads: Sequence[bool]) -> int:
        """The most that a run may leave out. ``grads``: which outputs will have a gradient; one that has is not left
        out. Nothing, unless the logits have not been read for long enough."""
        if grads[self.index] or self._calls < WATCHED or self.touched:
            return NOTHING
        return min(self.most, HEAD) if any(grads[i] for i in self.beside) else self.most

    def watched(self, outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What the caller gets for results that were computed; a read of them is noted."""
        if self.touched:
            return {}
        beside = self.beside if self.most == FORWARD and self._calls < WATCHED else ()
        self._calls += 1
        if self._calls == WATCHED:
            logits = outputs[self.index]
            self._row_bytes = logits.shape[-1] * logits.element_size() if logits.dim() else 0
        found: dict[int, torch.Tensor] = {}
        for i in (self.index, *beside):
            x = outputs[i]
            found[i] = Deferred(_Computed(self, i, x), x.dtype, x.shape, x.device)
        return found

    def note(self, output: int) -> None:
        """The script reads this one."""
        if output == self.index:
            self.touched = True
        else:
            self.most = min(self.most, HEAD)

    def deferred(self, hidden: torch.Tensor, feeds: dict[str, torch.Tensor], at_once: bool = False) -> torch.Tensor:
        """Logits that are computed when the script reads them. ``feeds``: what the graph was fed, by name.
        ``at_once``: they are computed now."""
        weights = [feeds[name].detach() for name in self.head.weights]
        if at_once:
            return self.head.compute(hidden, weights)
        source = _OneOf(_WaitingHead(self, hidden, weights), self.index)
        return Deferred(source, *self.head.like(hidden, weights), hidden.device)

    def repeated(
        self, shapes: tuple, tensors: Sequence[torch.Tensor], inputs: Collection[int], forward: RepeatedForward
    ) -> dict[int, torch.Tensor]:
        """Results for which forward runs again when the script reads one of them. ``shapes``: of the call.
        ``tensors``: what the graph was fed, of which ``inputs`` are the caller's."""
        specs = self._specs.get(shapes)
        if specs is None:
            known = forward.output_specs(tensors)
            if len(self._specs) >= MOST_SPECS:
                self._specs.clear()
            specs = {i: (getattr(torch, known[i][0]), known[i][1]) for i in (self.index, *self.beside)}
            self._specs[shapes] = specs
        kept = [copied(t) if i in inputs else t.detach() for i, t in enumerate(tensors)]
        waiting, device = _WaitingForward(self, kept, forward), tensors[0].device
        return {i: Deferred(_OneOf(waiting, i), *spec, device) for i, spec in specs.items()}


class RepeatedForward(Protocol):
    """A forward of the graph that has the logits, as one that was run without them."""

    def output_specs(self, tensors: Sequence[torch.Tensor]) -> Sequence[Spec]: ...
    def outputs(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]: ...


def deferral_of(
    model: Any, outputs: Sequence[str], candidates: Sequence[int], written: Collection[str],
    tensors: dict[str, torch.Tensor], setting: str, session: Callable[[bytes], Session], repeats: bool,
    beside: Collection[int],
) -> Deferral | None:  # fmt: skip
    """How logits among the ``candidates`` can be deferred: indices of ``outputs``, names; None: there are none.

    ``written``: inputs that forward changes. ``tensors``: the graph's inputs. ``setting``: of DEFER_LOGITS.
    ``session``, ``repeats``: as :class:`Deferral` takes them. ``beside``: outputs that a run may leave out, too.
    """
    if setting == "0" or torch_private.missing(torch_private.LOGITS):
        return None
    heads = Heads(model, written)
    for index in candidates:
        head = heads.find(outputs[index])
        if head is None or head.hidden in outputs or outputs.count(outputs[index]) > 1:
            continue
        if setting == "auto" and sum(tensors[name].numel() for name in head.weights) < LEAST_WEIGHTS:
            continue
        others = {i: outputs[i] for i in beside if i != index and outputs.count(outputs[i]) == 1}
        return Deferral(head, index, model, setting == "1", session, repeats, others)
    return None


# --- where the values come from ---------------------------------------------------------------------------------------


class _Computed:
    """A result that is computed already."""

    def __init__(self, deferral: Deferral, output: int, values: torch.Tensor) -> None:
        self.deferral, self.output, self._values = deferral, output, values

    def values(self) -> torch.Tensor:
        self.deferral.note(self.output)
        return self._values


class _OneOf:
    """One of the results that wait together."""

    def __init__(self, waiting: _Waiting, output: int) -> None:
        self.waiting, self.output = waiting, output

    def values(self) -> torch.Tensor:
        return self.waiting.result(self.output)


class _Waiting:
    """Results that are computed from ``tensors``, which must be what they are now, when one of them is read."""

    def __init__(self, deferral: Deferral, tensors: list[torch.Tensor]) -> None:
        self.deferral, self.tensors, self.digests = deferral, tensors, Digests(tensors)
        self._results: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        _waiting.add(self)

    def compute(self) -> dict[int, torch.Tensor]:
        """The results; what they are computed from is needed no longer."""
        raise NotImplementedError

    def result(self, output: int) -> torch.Tensor:
        with self._lock:
            self.deferral.note(output)
            if not self._results:
                late = (
                    f"{self._what(output)} not computed in their forward, since the script had read none before, and "
                )
                if _in_capture(self.tensors):
                    raise StateError(
                        f"{late}cannot be while a CUDA graph is captured: read them before, or set "
                        "ORTMODULE_DEFER_LOGITS=0"
                    )
                if not self.digests.hold(self.tensors):
                    raise StateError(
                        f"{late}weights that they depend on have changed since, outside of an optimizer's step: read "
                        "them before, or set ORTMODULE_DEFER_LOGITS=0 (from now on forward computes them)"
                    )
                self._finish()
            return self._results[output]

    def _what(self, output: int) -> str:
        return "these logits were" if output == self.deferral.index else "these results beside the logits were"

    def _finish(self) -> None:
        self._results = self.compute()
        self.tensors = []
        _waiting.discard(self)

    def keep(self, copies: dict[int, torch.Tensor]) -> None:
        """The weights may change from now on. ``copies``: those that were made, by data pointer. In a CUDA graph that
        is captured nothing can be kept: the digest finds what its replays change."""
        with self._lock:
            if not self._results and not _in_capture(self.tensors):
                self.keep_now(copies)

    def keep_now(self, copies: dict[int, torch.Tensor]) -> None:
        raise NotImplementedError


class _WaitingHead(_Waiting):
    """Hidden states, and the weights that they are multiplied by when the logits are read."""

    def __init__(self, deferral: Deferral, hidden: torch.Tensor, weights: list[torch.Tensor]) -> None:
        super().__init__(deferral, weights)
        self.hidden, self.copied = hidden, False

    def compute(self) -> dict[int, torch.Tensor]:
        logits = self.deferral.head.compute(self.hidden, self.tensors)
        for tensor in (self.hidden, *self.tensors) if self.hidden.is_cuda else ():
            tensor.record_stream(torch.cuda.current_stream(tensor.device))  # it may not be forward's
        del self.hidden
        return {self.deferral.index: logits}

    def keep_now(self, copies: dict[int, torch.Tensor]) -> None:
        if not self.copied:
            self.copied = True
            self.deferral.note_copies()
            self.tensors = [_copied(weight, copies) for weight in self.tensors]


class _WaitingForward(_Waiting):
    """All that forward read. Where the weights change while the results are there, they are computed before, and from
    then on runs of this graph leave out the head alone."""

    def __init__(self, deferral: Deferral, tensors: list[torch.Tensor], forward: RepeatedForward) -> None:
        super().__init__(deferral, tensors)
        self.forward = forward

    def compute(self) -> dict[int, torch.Tensor]:
        outputs = self.forward.outputs(self.tensors)
        return {i: outputs[i] for i in (self.deferral.index, *self.deferral.beside)}

    def keep_now(self, copies: dict[int, torch.Tensor]) -> None:
        self.deferral.most = min(self.deferral.most, HEAD)
        if self.digests.hold(self.tensors):  # else a read says so
            self._finish()


def _in_capture(tensors: Sequence[torch.Tensor]) -> bool:
    gpu = gpu_of(tensors)
    return gpu is not None and is_captured(gpu)


def _copied(tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    if tensor.data_ptr() not in copies:
        copies[tensor.data_ptr()] = copied(tensor)
    return copies[tensor.data_ptr()]


_waiting: weakref.WeakSet[_Waiting] = weakref.WeakSet()


def _before_step(optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The weights change after this, or after each call of a closure, which may leave logits of its own."""
    _keep_weights()
    return closures.followed(optimizer, args, kwargs, _keep_weights)


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
