"""Finds or makes the plan for the shapes of a call, and starts its run.

An :class:`Executable` is one plan, made ready to run; :class:`Executables` finds or makes the one for a call, with the
sizes that data decides (elements a mask selects), and starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ortmodule import _core
from ortmodule.core import devices
from ortmodule.core.dtypes import DTYPES
from ortmodule.engine.memory_goal import MemoryGoal, Spec
from ortmodule.engine.plan_cache import MOST_PLANS, PlanCache
from ortmodule.engine.row_count_predictor import Counts
from ortmodule.engine.session import (
    ENGINE_ERRORS,
    Run,
    Session,
    gpu_of,
    is_captured,
    run_planned,
)
from ortmodule.host.host_node import HOST_OPERATORS, Calls
from ortmodule.runtime.lazy_logits import NOTHING, Deferral
from ortmodule.runtime.segments import Segment

Flags = tuple[bool, ...]


@dataclass
class Executable:
    """A plan, and what Python needs to know of it for every run."""

    plan: Any
    output_grads: Flags | None
    sizes: tuple[int, ...]
    random: bool
    reads_input: list[int]  # what backward reads of the run's inputs and outputs
    reads_output: list[int]
    session: Session
    defers: int  # what it leaves out of the results (runtime/lazy_logits.py)
    segments: list[Segment]  # in which gradients may be handed over; none: all at once
    ready: bool  # :meth:`Executables.start` takes it for its shapes and gradients without looking at anything else


class Executables:
    """The plans of one graph, by the shapes of its inputs, the outputs that receive a gradient, and sizes."""

    def __init__(
        self,
        session: Session,
        tensors: Sequence[torch.Tensor],
        needs: Flags,
        varying: Sequence[tuple[int, int]],
        pairs: frozenset[int],
        segments: Callable[[Any], list[Segment]],
        check: Callable[[Any, tuple], None],
    ) -> None:
        """``tensors``: those of the first call; ``needs``: which of them need a gradient. ``varying``: places whose
        shapes follow the caller's inputs, with the numbers of these; ``pairs``: places of complex numbers.
        ``segments``: says how a plan's gradients are handed over. ``check``: raises for a plan that cannot be used."""
        self.session, self.needs, self.gpu = session, needs, gpu_of(tensors)
        self.specs = [(DTYPES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for t in tensors]
        self.varying, self._pairs, self._segments, self._check = varying, pairs, segments, check
        self.plans: PlanCache[Executable] = PlanCache(lambda kept: kept.plan.host_bytes)
        self.ahead = 0.0  # the work of the prologues of the latest sketch
        self.deferral: Deferral | None = None  # of logits
        self._counts = Counts(MOST_PLANS)
        #: Do steps add to gradients of earlier ones? Where that makes other plans these are apart.
        self.adds, self._others = False, dict[tuple, Executable]()

    def turn(self) -> None:
        """From now on steps add to gradients of earlier ones, or no more."""
        self.adds = not self.adds
        self._others = self.plans.exchange(self._others)

    def defer(self, deferral: Deferral | None) -> None:
        """From now on logits may be deferred."""
        self.deferral = deferral

    def prepare(
        self,
        shapes: tuple,
        output_grads: Flags | None,
        sizes: tuple[int, ...] = (),
        calls: Calls | None = None,
        defers: int = NOTHING,
    ) -> Executable:
        """The plan for these shapes of the inputs; ``sizes`` and ``calls`` as in :meth:`Session.plan`. ``defers``:
        what it leaves out of the logits."""
        key = (shapes, output_grads, sizes, defers)
        found = self.plans.get(key)
        if found is not None:
            self.plans.move_to_end(key)
            return found
        session = self.deferral.session(defers) if defers and self.deferral is not None else self.session
        plan = session.plan(self.specs_for(shapes), self.needs, output_grads, sizes, calls, self.gpu, self.adds)
        if not plan.prologue:
            self._check(plan, shapes)
        inputs = [i for i, flag in enumerate(plan.reads_input) if flag]
        outputs = [i for i, flag in enumerate(plan.reads_output) if flag]
        ready = self.gpu is None and session.known is None and self.deferral is None and not plan.prologue
        segments = self._segments(plan)
        found = Executable(plan, output_grads, sizes, plan.random, inputs, outputs, session, defers, segments, ready)
        for dropped in self.plans.add(key, found):
            dropped.session.let_go(dropped.plan)
        return found

    def specs_for(self, shapes: tuple) -> list[tuple[str, tuple[int, ...]]]:
        """(type, shape) of all tensors of a run, for these shapes of the caller's inputs."""
        specs = list(self.specs)
        for i, feed in self.varying:
            specs[i] = (specs[i][0], (*shapes[feed], 2) if i in self._pairs else tuple(shapes[feed]))
        return specs

    def sketch(
        self,
        shapes: tuple,
        grads: Flags | None,
        tensors: Callable[[], Sequence[torch.Tensor]],
        memory: MemoryGoal | None = None,
        adds: bool = False,
    ) -> _core.Plan:
        """The plan that such a run has, without the run: see :meth:`Session.sketch`. ``tensors``: gives those of the
        run, where data decides sizes; what counts these runs. ``adds``: as in :meth:`Session.plan`.

        Raises UnsupportedError where PyTorch runs a part of the graph, and has not yet.
        """
        deferral, level = self.deferral, self._level(grads)
        while deferral is not None and level:
            plan = self._sketch(deferral.session(level), shapes, grads, tensors, memory, adds)
            if deferral.gains(level, plan):
                return plan
            level -= 1
        return self._sketch(self.session, shapes, grads, tensors, memory, adds)

    def _sketch(
        self, session: Session, shapes: tuple, grads: Flags | None,
        tensors: Callable[[], Sequence[torch.Tensor]], memory: MemoryGoal | None, adds: bool,
    ) -> _core.Plan:  # fmt: skip
        specs, calls = self.specs_for(shapes), session.calls()
        sizes: tuple[int, ...] = ()
        self.ahead = 0.0
        while True:
            plan = session.sketch(specs, self.needs, grads, sizes, calls, self.gpu, memory, adds)
            if not plan.prologue:
                return plan
            self.ahead += computed(plan)
            if plan.probe or (calls is not None and any(row[0] in HOST_OPERATORS for row in plan.code())):
                raise _core.UnsupportedError("PyTorch runs a part of the graph: what it gives is known after a step")
            sizes = (*sizes, *session.next_sizes(plan, tensors(), 0)())  # a seed that is not drawn: torch's stay

    def start(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor], joint: bool
    ) -> tuple[Executable, Run]:
        """A forward without nodes that PyTorch runs. ``joint``: as of :class:`Run`."""
        level = self._level(grads)
        if self.gpu is not None:
            # A graph that the caller captures has the logits; so has its plan, where there is one.
            if level and (shapes, grads, (), NOTHING) in self.plans and is_captured(self.gpu):
                level = NOTHING
            return self._start_on_gpu(shapes, grads, tensors, level)
        found, seed = self.planned(shapes, grads, tensors, defers=level)
        while not self._pays(found):
            found, seed = self.planned(shapes, grads, tensors, seed, found.defers - 1)
        return found, Run(found.plan, tensors, seed or 0, None, joint=joint)

    def _level(self, grads: Flags | None) -> int:
        """What such a run leaves out of the logits, if that pays."""
        return NOTHING if self.deferral is None or grads is None else self.deferral.level(grads)

    def _pays(self, found: Executable) -> bool:
        return self.deferral is None or self.deferral.pays(found.defers, found.plan)

    def _start_on_gpu(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor], defers: int, seed: int | None = None
    ) -> tuple[Executable, Run]:
        """A run with the row counts of earlier steps, where these have been the same for a while. ``seed``: the one
        that was drawn already."""
        step, graphs = (shapes, grads, defers), self.session.graphs
        known: tuple[int, ...] = ()
        guess = self._counts.expected(step)
        plans = [self.prepare(shapes, grads, guess[:k], defers=defers) for k in range(0, len(guess) + 1, 2)]
        if guess and all(prologue.plan.bounded for prologue in plans[:-1]):
            seed = draw_seed() if seed is None and any(found.random for found in plans) else seed
            counting = [self.session.next_sizes(prologue.plan, tensors, seed or 0) for prologue in plans[:-1]]
            chosen = plans[-1]
            if self._pays(chosen):
                run = Run(chosen.plan, tensors, seed or 0, self.gpu, graphs=graphs)
            else:  # right for any counts, which may pay in a later step
                chosen, run = self._start_on_gpu(shapes, grads, tensors, defers - 1, seed)
            found = tuple(number for count in counting for number in count())
            if chosen is not plans[-1] or all(count <= room for count, room in zip(found, guess, strict=True)):
                self._counts.learn(step, found)
                return chosen, run
            right = next(k for k, room in enumerate(guess) if found[k] != room)
            known = found[: right + 1]  # what comes behind was counted among other rows
            del run
        chosen, seed = self.planned(shapes, grads, tensors, seed, defers, known)
        self._counts.learn(step, chosen.sizes)
        if not self._pays(chosen):
            return self._start_on_gpu(shapes, grads, tensors, defers - 1, seed)
        return chosen, Run(chosen.plan, tensors, seed or 0, self.gpu, graphs=graphs)

    def planned(
        self,
        shapes: tuple,
        grads: Flags | None,
        tensors: Sequence[torch.Tensor],
        seed: int | None = None,
        defers: int = NOTHING,
        sizes: tuple[int, ...] = (),
    ) -> tuple[Executable, int | None]:
        """A plan that is no prologue, and the seed of the run; ``seed``: the one that was drawn already; ``sizes``:
        those that are known already."""
        found = self.prepare(shapes, grads, sizes, defers=defers)
        while True:
            if seed is None and found.random:
                seed = draw_seed()
            if not found.plan.prologue:
                return found, seed
            more = self.session.next_sizes(found.plan, tensors, seed or 0)()
            found = self.prepare(shapes, grads, (*found.sizes, *more), defers=defers)

    def run_with(
        self, shapes: tuple, grads: Flags | None, tensors: Sequence[torch.Tensor], seed: int, calls: Calls | None,
        joint: bool = False,
    ) -> tuple[Executable, Run]:  # fmt: skip
        """A forward with nodes that PyTorch runs; those that are ``done`` in ``calls`` do not run again. ``joint``: as
        of :class:`Run`."""
        found: Any = None

        def plan(sizes: tuple[int, ...]) -> _core.Plan:
            nonlocal found
            found = self.prepare(shapes, grads, sizes, calls)
            return found.plan

        _, run = run_planned(plan, tensors, seed, calls, self.session.graphs, joint)
        return found, run

    def plan_first(self, shapes: tuple, grads: Flags | None) -> None:
        """For a GPU, the plan of the first run is made already: what has no kernel there is found out, backward's, too.

        Raises what making it raises.
        """
        if self.gpu is None:
            return
        calls = self.session.calls()
        try:
            self.prepare(shapes, grads, (), calls)
        except ENGINE_ERRORS:
            if calls is None or not calls.without_guesses():
                raise
            self.prepare(shapes, grads, (), calls)


class Repeated:
    """A forward of a graph that has the logits, with the seed of a run that left them out."""

    def __init__(self, executables: Executables, shapes: tuple, run: Run, found: Executable) -> None:
        self._executables, self._shapes, self._grads = executables, shapes, found.output_grads
        self._seed, self._gpu = run.seed, run.gpu

    def _plan(self, tensors: Sequence[torch.Tensor]) -> _core.Plan:
        return self._executables.planned(self._shapes, self._grads, tensors, self._seed)[0].plan

    def output_specs(self, tensors: Sequence[torch.Tensor]) -> Sequence[Spec]:
        """Types and shapes of its outputs; ``tensors``: the inputs, for what data decides."""
        specs = self._executables.session.output_specs(self._executables.specs_for(self._shapes))
        return self._plan(tensors).outputs if specs is None else specs

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of the forward over these."""
        return Run(self._plan(tensors), tensors, self._seed, self._gpu).outputs


def computed(plan: _core.Plan) -> float:
    """The work of a plan, about: multiplications and the like."""
    return sum(plan.work[:3])


def draw_seed() -> int:
    """63 bits of torch's generator: `manual_seed` repeats a run."""
    return torch.empty(1, dtype=torch.int64).random_().tolist()[0]


def seed_of(generators: Any) -> int:
    """What :func:`draw_seed` gave in this state of torch's generators, which stay as they are now."""
    now = devices.generators()
    devices.set_generators(generators)
    try:
        return draw_seed()
    finally:
        devices.set_generators(now)
