"""Prints what backward can compute again, in clusters of places where the same operators do it.

``MEMORY_OPT_CONFIG`` chooses from it. At log level INFO the table comes with the first training step of each graph.
"""

from __future__ import annotations

import difflib
import logging
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ortmodule import _core
from ortmodule.core.config import PREFIX, Config
from ortmodule.core.errors import DoesNotHold, NotInEngine
from ortmodule.core.logger import LOGGER, Log
from ortmodule.core.settings.setting_types import wishes_of
from ortmodule.debug.memory.size_formulas import Formulas
from ortmodule.debug.step_stats import input_names, table
from ortmodule.engine.memory_goal import MemoryGoal
from ortmodule.engine.session import ENGINE_ERRORS
from ortmodule.runtime.compiled_graph import Call, CompiledGraph
from ortmodule.runtime.dispatcher import Dispatcher
from ortmodule.runtime.executable import Executable


class Cluster(NamedTuple):
    """Places of forward that backward can compute again by the same operators."""

    operators: str  #: "LayerNormalization+Gelu+"
    strategy: int  #: 1: from what is kept anyway; 2: from something smaller that is kept for it
    recomputed: int  #: so many of its places are computed again
    bytes: tuple[int, ...]  #: that each place need not keep then

    @property
    def config(self) -> str:
        """All of its places, for MEMORY_OPT_CONFIG."""
        return f"{self.operators}:{self.strategy}:-1"


_COLUMNS = ("", "CONFIG", "STATE", "FREQ", "MAX SAVING (BYTES)", "SAVING SYMBOLIC (BYTES)")


class ClusterTable:
    """Tells the clusters of each graph once, and which of the user's there are not."""

    def __init__(self, config: Config, log: Log) -> None:
        self.config, self.log = config, log
        self.wishes = wishes_of(config.memory_opt_config) if not config.memory_opt_level else ()
        self._seen: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()

    @staticmethod
    def of(owner: Dispatcher) -> ClusterTable | None:
        """The one that the module's settings ask for, or None."""
        if not owner.config.memory_opt_config and not LOGGER.isEnabledFor(logging.INFO):
            return None
        return ClusterTable(owner.config, owner.log)

    def tell(self, graph: CompiledGraph, call: Call) -> None:
        """After a forward."""
        if graph in self._seen:
            return
        found = [(part, executable) for part in graph.parts() if (executable := _latest(part)) is not None]
        if not found:
            return
        self._seen.add(graph)
        clusters = [clusters_of(executable.plan) for _, executable in found]
        self._warn([cluster for each in clusters for cluster in each])
        if not LOGGER.isEnabledFor(logging.INFO):
            return
        names = input_names(graph_module(call), call.arguments, len(call.inputs))
        for (part, _), rows in zip(found, clusters, strict=True):
            formulas = formulas_of(part, call, names, rows) if part is graph else [""] * len(rows)
            self.log.info(self.text(rows, formulas))

    def _warn(self, clusters: Sequence[Cluster]) -> None:
        known = {(c.operators, c.strategy) for c in clusters} | {(c.operators, 0) for c in clusters}
        for operators, strategy, count in self.wishes:
            if (operators, strategy) not in known:
                near = difflib.get_close_matches(f"{operators}:{strategy}:-1", [c.config for c in clusters], 1, 0.3)
                advice = f"; the nearest is {near[0]}" if near else ""
                wish = f"{operators}:{strategy}:{count}"
                self.log.warn_once(f"{PREFIX}MEMORY_OPT_CONFIG: there is no cluster for {wish} in this graph{advice}")

    def text(self, clusters: Sequence[Cluster], formulas: Sequence[str]) -> str:
        """The table, the largest saving first. ``formulas``: of the bytes, from the sizes of inputs."""
        settings = ", ".join(
            f"{PREFIX}{name}={value}"
            for name in ("MEMORY_OPT_LEVEL", "MEMORY_BUDGET", "MEMORY_OPT_CONFIG")
            if (value := getattr(self.config, name.lower()))
        )
        head = f"memory optimizer ON: {settings}" if settings else (
            f"memory optimizer OFF: {PREFIX}MEMORY_BUDGET=<bytes>, {PREFIX}MEMORY_OPT_LEVEL=1 or "
            f"{PREFIX}MEMORY_OPT_CONFIG=<config>,<config>,... turns it on; what costs next to nothing, or lies in "
            "checkpoints, is ON in any case"
        )  # fmt: skip
        pairs = sorted(zip(clusters, formulas, strict=True), key=lambda pair: -sum(pair[0].bytes))
        rows = [
            (
                f"Plan {i}",
                cluster.config,
                f"ON {cluster.recomputed}" if cluster.recomputed else "OFF",
                str(len(cluster.bytes)),
                f"{sum(cluster.bytes):,}",
                formula,
            )
            for i, (cluster, formula) in enumerate(pairs, 1)
        ]
        return f"{head}\n{table([_COLUMNS, *rows])}"


def clusters_of(plan: _core.Plan) -> list[Cluster]:
    """Of a plan that was asked for them, the first in forward first."""
    return [Cluster(*row) for row in plan.clusters]


def graph_module(call: Call) -> Any:
    """The module that is called."""
    return call.tree.modules[""]


def _latest(graph: CompiledGraph) -> Executable | None:
    """Of its plans with a backward the one that ran last."""
    plans = reversed(graph.executables.plans.values())
    return next((found for found in plans if found.plan.differentiates and not found.plan.prologue), None)


# --- bytes as formulas ------------------------------------------------------------------------------------------------


def formulas_of(graph: CompiledGraph, call: Call, names: Sequence[str], clusters: Sequence[Cluster]) -> list[str]:
    """For each cluster its bytes, computed from sizes of inputs ("512*ids_dim0*ids_dim1"); empty where plans of other
    sizes do not say it. Where data decides sizes, larger inputs hold what these do, more than once. ``names``: of the
    inputs."""
    expected = [(cluster.operators, cluster.strategy, len(cluster.bytes)) for cluster in clusters]

    def bytes_at(shapes: tuple) -> list[int] | None:
        """Bytes of all places, one cluster after another."""
        try:
            plan = graph.sketch(shapes, lambda: repeated(call.inputs, shapes), MemoryGoal(0, 0, clusters=()))
        except (*ENGINE_ERRORS, DoesNotHold, NotInEngine, MemoryError):
            return None
        found = clusters_of(plan)
        if [(c.operators, c.strategy, len(c.bytes)) for c in found] != expected:
            return None
        return [count for cluster in found for count in cluster.bytes]

    formulas = Formulas(call.shapes, names, frozenset(graph.capture.pinned), bytes_at).find() if clusters else None
    if formulas is None:
        return [""] * len(clusters)
    texts, begin = [], 0
    for cluster in clusters:
        texts.append(formulas.text(begin, begin + len(cluster.bytes)))
        begin += len(cluster.bytes)
    return texts


def repeated(tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors of other shapes with the same elements, again and again."""
    result = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        part = tensor.detach()
        for d, size in enumerate(shape):
            if part.shape[d] != size:
                part = part.index_select(d, torch.arange(size, device=part.device) % part.shape[d])
        result.append(part)
    return result
