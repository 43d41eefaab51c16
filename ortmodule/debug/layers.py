"""Counts the nodes of a graph by layers, as it was exported and as it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from ortmodule import _core
from ortmodule.core.onnx_utils import without_dead
from ortmodule.debug.memory.peak import module_path
from ortmodule.debug.profile import EXPORTED, nodes_of
from ortmodule.host.host_node import HOST_OPERATORS
from ortmodule.runtime.compiled_graph import CompiledGraph

MOST_LINES = 12  # of a printed report
#: Steps of a path outside of numbered layers that are kept: "bert.embeddings" of "bert.embeddings.norm".
MOST_STEPS = 2


@dataclass(frozen=True)
class LayerReport:
    """The nodes of one layer: a module of a list, as ``encoder.layers.0``, or another submodule."""

    path: str  #: "": the module itself
    exported: int  #: nodes of the exported graph, constants aside
    forward: int  #: instructions of forward
    backward: int  #: and of backward
    fused: int  #: of both, those that a pass made, or what they are the gradient of
    recomputed: int  #: instructions by which backward computes values again
    islands: int  #: that PyTorch runs

    def __str__(self) -> str:
        return f"{self.path or '(the module itself)'}: {self._counts()}"

    def _counts(self) -> str:
        text = f"{self.exported} nodes exported, {self.forward} + {self.backward} run, {self.fused} of them fused"
        text += f", {self.recomputed} compute again" if self.recomputed else ""
        return text + (f", {self.islands} by PyTorch" if self.islands else "")


def layer_of(path: str) -> str:
    """ "encoder.layers.0.norm" -> "encoder.layers.0"; "bert.embeddings.norm" -> "bert.embeddings"."""
    steps = path.split(".")
    for i, step in enumerate(steps):
        if step.isdigit():
            return ".".join(steps[: i + 1])
    return ".".join(steps[:MOST_STEPS])


def layers_of(graphs: Iterable[CompiledGraph], plans: Iterable[_core.Plan]) -> list[LayerReport]:
    """The layers of exported graphs, and what of them the plans run, in the order of forward."""
    counts: dict[str, list[int]] = {}
    for graph in graphs:
        for node in without_dead(graph.capture.model).graph.node:
            if node.op_type != "Constant":
                counts.setdefault(layer_of(module_path(node.name)), [0] * 6)[0] += 1
    for plan in plans:
        for run in nodes_of(plan):
            if run.instruction < 0:
                continue
            of = counts.setdefault(layer_of(run.module), [0] * 6)
            of[1 if run.part == "forward" else 2] += 1
            for i, true in enumerate((run.made_by != EXPORTED, run.recomputed, run.operator in HOST_OPERATORS), 3):
                of[i] += true
    return [LayerReport(path, *of) for path, of in counts.items()]


def layer_lines(layers: Sequence[LayerReport]) -> list[str]:
    """One line for neighbours of one list that are alike."""
    lines = []
    for _, group in itertools.groupby(layers, key=lambda layer: (layer.path.rpartition(".")[0], astuple(layer)[1:])):
        first, *others = group
        numbered = others and first.path.rpartition(".")[2].isdigit()
        if numbered:
            last = others[-1].path.rpartition(".")[2]
            lines.append(f"{first.path} to {last}, each: {first._counts()}")
        else:
            lines += [str(layer) for layer in (first, *others)]
    return lines
