"""Hands gradients over while backward goes on, in segments.

One node in autograd's graph gives all gradients at once, when backward has run to its end: hooks on parameters, which
start communication (DistributedDataParallel) or an optimizer's step, wait for it, and where gradients are added to
earlier ones both are there at once. So a large backward becomes a chain
of nodes, each with the parameters whose gradients it completes; from one to the next goes a token, an empty tensor.
Autograd calls the hooks of one node's parameters before it calls the next node.

What is under way (:class:`Pass`) travels with the token's gradient. So it belongs to one backward, and is gone
when that ends early: because of an exception, or since autograd was not asked for the other gradients.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from ortmodule import _core
from ortmodule.core.torch_private import keeps_graph
from ortmodule.engine import memory_goal
from ortmodule.engine.session import ENGINE_ERRORS, Backward
from ortmodule.runtime.autograd_bridge import Pending
from ortmodule.runtime.calls import capture_budget
from ortmodule.runtime.executable import Executables
from ortmodule.runtime.segments import Segment

#: Steps from one look for hooks to the next, after the first few.
FIRST_LOOKS, LOOKS = 4, 16


def in_a_group() -> bool:
    """What hooks are on a parameter in C++ cannot be seen: where there is a process group there may be some."""
    return distributed.is_available() and distributed.is_initialized()


def have_hooks(leaves: Iterable[torch.Tensor]) -> bool:
    """Does something wait for one of their gradients?"""
    return any([t._post_accumulate_grad_hooks or t._backward_hooks for t in leaves])


class EarlyUse:
    """Is there a use for gradients before backward is through? Hooks or collectives may wait for them; those that are
    added to earlier ones would take their memory once more if all were made before the first is added. Looking at all
    parameters for hooks takes a while, so it is done now and then: a hook is called in any case."""

    def __init__(self, tensors: Sequence[torch.Tensor], leaves: Sequence[int]) -> None:
        """``leaves``: places among ``tensors``, of those that need a gradient."""
        self._steps, self._hooked, self._largest = 0, False, -1
        #: Does it matter who has the memory of gradients?
        self.large = sum(tensors[i].nbytes for i in leaves) > min(memory_goal.SEGMENT_BYTES, memory_goal.JOINT_FROM)
        #: May the next step have its gradients in its arena? Not where there was a use for them lately: of micro-
        #: batches only the first finds none, and another kind of arena would cost all its pages.
        self.joint, self._recent = False, 0
        #: What has other plans for steps that add to gradients, if it matters.
        self.plans: Executables | None = None

    def finds(self, leaves: Sequence[torch.Tensor]) -> bool:
        """``leaves``: the same ones in each step."""
        found = self._finds(leaves)
        self._recent = LOOKS if found else max(0, self._recent - 1)
        self.joint = self._recent == 0
        if self.plans is not None and self.plans.adds is self.joint:
            self.plans.turn()
        return found

    def _finds(self, leaves: Sequence[torch.Tensor]) -> bool:
        if in_a_group():
            return True
        if self._largest < 0:
            self._largest = max(range(len(leaves)), key=lambda k: leaves[k].numel())
        largest = leaves[self._largest]
        if largest.is_leaf and largest.grad is not None:
            return True
        if self._steps < FIRST_LOOKS or self._steps % LOOKS == 0:
            self._hooked = have_hooks(leaves)
        self._steps += 1
        return self._hooked


# --- the chain --------------------------------------------------------------------------------------------------------


def chain(pending: Pending, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The differentiable outputs of ``pending``. What runs first in backward is made last."""
    segments = pending.executable.segments
    made: Any = None
    for number in range(len(segments) - 1, -1, -1):
        own = [leaves[k] for k in segments[number].leaves]
        made = (LaterNode if number else FirstNode).apply(pending, number, made, *own)
    return made


def _token(pending: Pending) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=pending.device)


class LaterNode(torch.autograd.Function):
    """The node of a later segment: what it gives to the one before is a token."""

    @staticmethod
    def forward(
        ctx: Any, pending: Pending, number: int, token: torch.Tensor | None, *leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.pending, ctx.number = pending, number
        ctx.set_materialize_grads(False)
        segment = pending.executable.segments[number]
        read = pending.read(segment.inputs, segment.outputs)
        # An output knows the chain: if the chain knew the output nothing of both would ever be freed.
        first = len(segment.inputs)
        ctx.save_for_backward(*read[:first], *(t.detach() for t in read[first:]))
        return _token(pending)

    @staticmethod
    def backward(ctx: Any, token: Any) -> tuple[torch.Tensor | None, ...]:
        return None, None, *token.under_way.hand_over(ctx)


class FirstNode(torch.autograd.Function):
    """The node of the segment that runs first; the outputs come from it."""

    @staticmethod
    def forward(
        ctx: Any, pending: Pending, number: int, token: torch.Tensor, *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.pending, ctx.number = pending, number
        ctx.set_materialize_grads(False)
        segment = pending.executable.segments[number]
        ctx.save_for_backward(*pending.read(segment.inputs, segment.outputs))
        return pending.take_outputs()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.pending.watched is not None:
            ctx.pending.watched.check(grads)
        return None, None, *Pass(ctx.pending, grads).hand_over(ctx)


class Pass:
    """One backward of a chain, under way."""

    def __init__(self, pending: Pending, grads: Sequence[torch.Tensor | None]) -> None:
        """``grads``: of the differentiable outputs."""
        self.pending, self.grads = pending, grads
        self.backward: Backward | None = None
        self.kept = True  # for another backward
        self.none: list[bool] | None = None  # of the inputs, which get no gradient although the plan has one
        self.reached: Container[int] = ()  # of the inputs, which get zeros where the plan has none
        self.found: list[torch.Tensor | None] | None = None  # all the leaves' gradients, where they come at once

    def hand_over(self, ctx: Any) -> list[torch.Tensor | None]:
        """Runs the segment of the node ``ctx``: the gradients of its token and its leaves."""
        start, variant = capture_budget.clock(), self.pending.graph.variant
        segments, number = self.pending.executable.segments, ctx.number
        segment = segments[number]
        if self.found is None:
            saved = ctx.saved_tensors  # raises after a backward that did not retain the graph, and after an edit
            if torch.is_grad_enabled():
                self.found = list(self.pending.eager_backward(self.grads))
        if self.found is None:
            try:
                if number == 0:
                    self._begin()
                if self.found is None:
                    self._run(segment, saved)
            except ENGINE_ERRORS as error:
                self.backward = None
                self.pending.graph.failed(error)
                with torch.enable_grad():
                    found = self.pending.eager_backward(self.grads)
                self.found = [None if grad is None else grad.detach() for grad in found]
        variant.seconds += capture_budget.clock() - start
        token: Any = None
        if number + 1 < len(segments):
            token = _token(self.pending)
            token.under_way = self
        gradients = [self._taken(k) for k in segment.leaves]
        if token is None and not self.pending.graph.keeps_memory:
            self._give_back()
        return [token, *gradients]

    def _give_back(self) -> None:
        """The memory of the run, behind the last segment."""
        self.backward = None
        if not self.kept:
            self.pending.forget()
        _core.memory_trim()

    def _begin(self) -> None:
        pending = self.pending
        self.kept = keep = keeps_graph()
        if not keep:
            self.pending = pending = pending.taken()
        output_grads, wanted = pending.arrived(self.grads)
        self.reached = pending.graph.reached(wanted)
        if pending.lacks(wanted):
            found = pending.rerun_forward(wanted).backward(output_grads)
            self.found = [found[i] for i in pending.graph.leaves]
            return
        self.none = pending.without_gradient(wanted)
        self.backward = Backward(pending.run, output_grads, keep)

    def _run(self, segment: Segment, saved: Sequence[torch.Tensor]) -> None:
        inputs, outputs = self.pending.spread(segment.inputs, segment.outputs, saved)
        assert self.backward is not None, "the first segment began it"
        self.backward.run(segment.first, segment.last, segment.grads, inputs, outputs)

    def _taken(self, leaf: int) -> torch.Tensor | None:
        """A gradient, to which the engine keeps no reference: autograd need not copy it."""
        i = self.pending.graph.leaves[leaf]
        if self.found is not None:
            grad, self.found[leaf] = self.found[leaf], None
        else:
            assert self.backward is not None, "the first segment began it"
            grad, self.backward.grads[i] = self.backward.grads[i], None
            grad = None if self.none is not None and self.none[i] else grad
        return torch.zeros_like(self.pending.tensors[i]) if grad is None and i in self.reached else grad
