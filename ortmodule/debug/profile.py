"""Measures the operators of training steps, and writes their times as tables and as a trace for Perfetto.

The engine measures every instruction of its plans while a :class:`Profile` is open. On a GPU that is the time to start
an instruction, not to run it: there `torch.profiler` has the kernels, with the engine's operators above them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ortmodule import _core
from ortmodule.core import pytree
from ortmodule.core.errors import ArgumentTypeError
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.settings.safe_files import write_whole
from ortmodule.debug.memory.peak import module_path
from ortmodule.engine.session import PLAN_MADE
from ortmodule.runtime.dispatcher import Dispatcher

MOST_ROWS = 15  # of each printed table
#: What made an operator that no pass did.
EXPORTED = "as exported"


@dataclass(frozen=True)
class NodeTime:
    """An operator of a plan, with the time that it took in all runs that were measured."""

    operator: str
    module: str  #: path of the submodule that it belongs to; "": of the module itself
    part: Literal["forward", "backward"]
    made_by: str  #: the pass that made it, or what it is the gradient of; "as exported": none did
    recomputed: bool  #: backward computes it again
    seconds: float
    runs: int
    dtype: str = ""  #: of its first result
    shape: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Seconds of one run."""
        return self.seconds / self.runs if self.runs else 0.0


@dataclass(frozen=True)
class PlanNode:
    """A node of a plan's graph."""

    operator: str
    name: str
    part: Literal["forward", "backward"]
    operands: list[int | str | None]  #: numbers of results, names of inputs; None: constants, and what is not there
    results: list[int | None]
    spec: tuple[str, tuple[int, ...]] | None  #: type and shape of the first result
    instruction: int  #: -1: a view
    made_by: str  #: as in :class:`NodeTime`
    recomputed: bool

    @property
    def module(self) -> str:
        return module_path(self.name)


def nodes_of(plan: _core.Plan) -> list[PlanNode]:
    """All nodes of a plan's graph."""
    found: list[PlanNode] = []
    forward: dict[str, str] = {}  # the passes that made nodes, by names
    for operator, name, part, operands, results, spec, at, by, recomputed in plan.graph():
        if part == "forward" and by and name:
            forward.setdefault(name, by)
        elif part == "backward" and not by:  # a gradient has the name of what it is of
            by = forward.get(name, "")
        found.append(PlanNode(operator, name, part, operands, results, spec, at, by or EXPORTED, recomputed))
    return found


def node_times(plan: _core.Plan) -> list[NodeTime]:
    """Of each instruction of a plan that is measured, in the order of execution."""
    runs = dict(zip(("forward", "backward"), plan.profiled, strict=True))
    made = {node.instruction: (node.made_by, node.recomputed) for node in nodes_of(plan)}
    found = []
    for at, (operator, name, part, seconds, spec) in enumerate(plan.code()):
        dtype, shape = spec or ("", ())
        found.append(NodeTime(operator, module_path(name), part, *made[at], seconds, runs[part], dtype, tuple(shape)))
    return found


class Profile:
    """What :func:`profile` measures: the operators of all steps of a module between ``with`` and its end.

    ``str()`` of it is three tables: by operator, by module, by pass.
    """

    def __init__(self, owner: Dispatcher) -> None:
        self.name = type(owner.module).__name__
        #: The plans that ran, each with its instructions in the order of execution.
        self.plans: list[list[NodeTime]] = []
        self.steps = 0  #: calls that the engine ran
        self._owner = owner
        self._measured: list[_core.Plan] = []
        self._of: dict[int, list[NodeTime]] = {}

    def __enter__(self) -> Profile:
        for plan in self._plans():
            self._measure(plan)
        PLAN_MADE.append(self._measure)
        self.steps -= self._owner.usage.engine
        return self

    def __exit__(self, *raised: Any) -> None:
        PLAN_MADE.remove(self._measure)
        self.steps += self._owner.usage.engine
        own = {id(plan) for plan in self._plans()}
        for plan in self._measured:
            if id(plan) in own and any(plan.profiled) and not plan.prologue:
                self.plans.append(node_times(plan))
                self._of[id(plan)] = self.plans[-1]
            plan.profile(False)

    def _measure(self, plan: _core.Plan) -> None:
        plan.profile(True)
        self._measured.append(plan)

    def _plans(self) -> Iterator[_core.Plan]:
        for graph in [graph for variants in self._owner.graphs.values() for graph in variants]:
            for session in graph.sessions():
                yield from session.plans.values()

    def of(self, plan: _core.Plan) -> list[NodeTime] | None:
        """The instructions of this plan; None: no step ran by it."""
        return self._of.get(id(plan))

    @property
    def times(self) -> list[NodeTime]:
        """Those of all plans."""
        return [time for times in self.plans for time in times]

    @property
    def seconds(self) -> float:
        """Of all operators in all steps."""
        return sum(time.seconds for time in self.times)

    def by_operator(self) -> dict[str, float]:
        """{operator: seconds in all steps}, the longest first."""
        return self._by(lambda time: time.operator)

    def by_module(self) -> dict[str, float]:
        """The same by the path of the submodule, "" for the module itself."""
        return self._by(lambda time: time.module)

    def by_pass(self) -> dict[str, float]:
        """The same by the pass that made an operator, or what it is the gradient of."""
        return self._by(lambda time: "computed again by backward" if time.recomputed else time.made_by)

    def _by(self, key: Callable[[NodeTime], str]) -> dict[str, float]:
        sums: dict[str, float] = {}
        for time in self.times:
            sums[key(time)] = sums.get(key(time), 0.0) + time.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        lines = [f"{self.name}: {1e3 * self.seconds:.1f} ms in the engine's operators"]
        for title, rows in (
            ("by operator", self.by_operator()), ("by module", self.by_module()), ("by pass", self.by_pass()),
        ):  # fmt: skip
            lines.append(title)
            lines += [self._row(name or "(the module itself)", spent) for name, spent in list(rows.items())[:MOST_ROWS]]
            if len(rows) > MOST_ROWS:
                lines.append(self._row(f"{len(rows) - MOST_ROWS} more", sum(list(rows.values())[MOST_ROWS:])))
        return "\n".join(lines)

    def _row(self, name: str, seconds: float) -> str:
        return f"  {1e3 * seconds:10.3f} ms {100 * seconds / (self.seconds or 1):5.1f} %  {name}"

    # --- a trace ------------------------------------------------------------------------------------------------------

    def trace(self) -> dict[str, Any]:
        """One step of each plan as JSON trace events, for Perfetto (ui.perfetto.dev) and `chrome://tracing`.

        Operators stand one behind the other, as long as they took in the mean, in their submodules.
        """
        events: list[dict[str, Any]] = []
        for pid, times in enumerate(self.plans):
            runs = max((time.runs for time in times), default=0)
            events.append(_named("process_name", pid, f"{self.name}, plan {pid}: {runs} runs"))
            events.append(_named("thread_name", pid, "a step, in the mean"))
            events += _slices(times, pid)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | Path) -> None:
        """Writes :meth:`trace` to a file."""
        write_whole(Path(path), json.dumps(self.trace()).encode())


def _named(kind: str, pid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}


def _slices(times: list[NodeTime], pid: int) -> Iterator[dict[str, Any]]:
    """Slices of forward and backward, of submodules in them, and of operators in these."""
    open_at: list[tuple[str, int]] = []  # (name, nanoseconds) of what is open
    now = 0

    def slice_of(name: str, kind: str, start: int, args: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": 0, "ts": start / 1e3,
                "dur": (now - start) / 1e3, "args": args}  # fmt: skip

    for time in [*times, None]:
        path = [] if time is None else [time.part, *filter(None, time.module.split("."))]
        same = 0
        while same < min(len(path), len(open_at)) and path[same] == open_at[same][0]:
            same += 1
        while len(open_at) > same:
            names = [name for name, _ in open_at]
            name, start = open_at.pop()
            yield slice_of(name, "module" if open_at else "part", start, {"module": ".".join(names[1:])})
        open_at += [(name, now) for name in path[same:]]
        if time is not None:
            start, now = now, now + round(1e9 * time.mean)
            args = {"module": time.module, "made by": time.made_by, "shape": list(time.shape), "dtype": time.dtype}
            yield slice_of(time.operator, "operator", start, args | {"recomputed": time.recomputed, "runs": time.runs})


# --- steps ------------------------------------------------------------------------------------------------------------


def profile(model: nn.Module) -> Profile:
    """Measures each operator of ``model``, an ORTModule, in the steps between ``with`` and its end::

        with ortmodule.profile(model) as measured:
            for batch in batches:
                model(**batch).loss.backward()
        print(measured)

    A step takes a little longer meanwhile. Raises TypeError for another module.
    """
    owner = dispatcher_of(model)
    if owner is None:
        raise ArgumentTypeError(f"profile() wants an ORTModule, not {type(model).__name__}")
    return Profile(owner)


def train_step(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """A forward and a backward: of the first result that is a scalar with a gradient, or else of the sum of all results
    with one. Gradients are let go."""
    result = model(*args, **kwargs)
    reached = [t for t in pytree.flatten(result, results=True)[0] if t.requires_grad]
    losses = [t for t in reached if t.dim() == 0]
    if losses:
        losses[0].backward()
    elif reached:
        torch.stack([t.abs().sum() for t in reached]).sum().backward()
    model.zero_grad(set_to_none=True)
