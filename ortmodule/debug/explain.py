"""Explains what became of a module: how it was captured, what runs, what it costs."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import onnx
from torch import nn

from ortmodule import _core
from ortmodule.core import torch_private
from ortmodule.core.config import Config
from ortmodule.core.errors import ArgumentTypeError
from ortmodule.core.names import STATE
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.objects.weights import weights
from ortmodule.debug.layers import MOST_LINES, LayerReport, layer_lines, layers_of
from ortmodule.debug.memory.peak import Peak, in_units, peak_so_far
from ortmodule.runtime.calls.capture_budget import Budget, Variant
from ortmodule.runtime.compiled_graph import CompiledGraph
from ortmodule.runtime.dispatcher import Dispatcher

#: Sentences of a printed report about what libraries refused; lines about variants.
MOST_REFUSED, MOST_VARIANTS = 3, 8


@dataclass(frozen=True)
class VariantReport:
    """Calls that one graph is for, or would be: what :func:`explain` says of them."""

    what: str  #: what tells them from the others: the line, and the value there
    captured: bool  #: there is a graph; otherwise they run in PyTorch, and wait for one
    capture_seconds: float  #: what captures took, those that failed, too
    runs: int  #: calls in the engine
    seconds: float  #: of these, forward and backward
    waited: int  #: calls in PyTorch
    pytorch_seconds: float  #: of these, forward and backward
    gain_seconds: float | None  #: saved in the engine, about; None: PyTorch has run no such calls

    def __str__(self) -> str:
        if not self.captured:
            return f"waits, {self.waited} calls in PyTorch ({self.pytorch_seconds:.2f} s): {self.what}"
        gain = "" if self.gain_seconds is None else f", saved about {self.gain_seconds:.2f} s"
        return f"{self.runs} runs ({self.seconds:.2f} s){gain}, captured in {self.capture_seconds:.2f} s: {self.what}"


@dataclass(frozen=True)
class Report:
    """What :func:`explain` found. The counts are those of the graph and the plan that ran last."""

    name: str
    captured: bool  #: the engine ran the latest call
    fallback: str | None  #: why PyTorch ran it, or None
    aten_ops: list[str] = field(default_factory=list)  #: ATen operators that PyTorch runs inside the graph
    python_ops: list[str] = field(default_factory=list)  #: autograd functions, submodules: the same
    breaks: list[str] = field(default_factory=list)  #: those of them that PyTorch's autograd joins with what is around
    #: Submodules that FSDP2 shards, by path: graphs of their own, each between its all-gather and its reduce-scatter.
    sharded: dict[str, Report] = field(default_factory=dict)
    #: Submodules, by path, that are graphs of their own where PyTorch runs the module, or the submodule, around them.
    parts: dict[str, Report] = field(default_factory=dict)
    weights_in_engine: float = 1.0  #: the share that the engine computes with of all weights, those of embeddings aside
    fused: dict[str, int] = field(default_factory=dict)  #: how often each pass and pattern found something to fuse
    nodes_exported: int = 0  #: in the graph as it was exported
    nodes_run: int = 0  #: instructions of a step, forward and backward
    layers: list[LayerReport] = field(default_factory=list)  #: the same nodes by layers, in the order of forward
    exports: int = 0  #: graphs that were made
    plans: int = 0  #: plans that were made: one for each new shape
    peak_bytes: int = 0  #: the arena of a step, the largest of all that ran, known before it runs
    peak: Peak | None = None  #: of that step: all of its memory, the optimizer's states aside
    seconds: dict[str, float] = field(default_factory=dict)  #: by phase: capture, read, plan, tune
    cuda_graphs: int = 0  #: that all modules of this process keep, in memory that torch does not count
    refused: list[str] = field(default_factory=list)  #: by NVIDIA's libraries; slower ways were taken
    tuned: int = 0  #: classes of matrix products that were measured (ENABLE_TUNING)
    tuned_convolutions: int = 0  #: convolutions on a GPU that were measured (CONV_ALGO_SEARCH)
    variants: list[VariantReport] = field(default_factory=list)  #: those with a graph first
    capture_seconds: float = 0.0  #: of all captures, those that failed, too
    first_capture_seconds: float = 0.0  #: of those among them that CAPTURE_SHARE leaves out
    step_seconds: float = 0.0  #: of all steps, forward and backward, in the engine and in PyTorch
    missing: list[str] = field(default_factory=list)  #: a sentence for each private name that this PyTorch lacks
    sparsity: list[str] = field(default_factory=list)  #: what ENABLE_*SPARSE_OPTIMIZER do for the graph, or why nothing
    engine_calls: int = 0  #: that the engine ran, with all graphs, since the module was wrapped
    pytorch_calls: int = 0  #: that PyTorch ran, for any reason
    unreached_steps: int = 0  #: of optimizers, with gradients of the module, but without a call of it

    def __str__(self) -> str:
        missing = [f"  missing    {sentence}" for sentence in self.missing]
        if not self.captured:
            none = "no call has reached ORTModule" if self.unreached_steps else "no call yet"
            head = f"{self.name}: PyTorch runs it ({self.fallback or none})"
            return "\n".join([head, *self._sharded(), *self._parts(), *self._calls(), *self._variants(), *missing])
        spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())
        fused = ", ".join(f"{name} {times}x" for name, times in self.fused.items()) or "nothing"
        outside = ", ".join([*self.aten_ops, *self.python_ops]) or "nothing"
        breaks = [f"  breaks     the graph at {', '.join(self.breaks)}: PyTorch's autograd joins the pieces"]
        measured = {"classes of products": self.tuned, "convolutions": self.tuned_convolutions}
        kinds = ", ".join(f"{count} {what}" for what, count in measured.items() if count)
        tuned = [f"  tuned      {kinds}"] if kinds else []
        graphs = [f"  graphs     {self.cuda_graphs} CUDA graphs are kept, of all modules"] if self.cuda_graphs else []
        refused = [f"  refused    {sentence}" for sentence in self.refused[:MOST_REFUSED]]
        if len(self.refused) > MOST_REFUSED:
            refused.append(f"  refused    and {len(self.refused) - MOST_REFUSED} more")
        return "\n".join(
            (
                f"{self.name}: the engine runs it",
                *self._calls(),
                f"  nodes      {self.nodes_exported} exported, {self.nodes_run} run in a step",
                *self._layers(),
                f"  fused      {fused}",
                *(f"  sparsity   {sentence}" for sentence in self.sparsity),
                f"  PyTorch    runs {outside} inside the graph",
                *self._sharded(),
                *self._parts(),
                *(breaks if self.breaks else []),
                f"  made       graphs: {self.exports}, plans: {self.plans}",
                *tuned,
                *graphs,
                *refused,
                f"  peak       {self.peak_bytes / 2**20:.1f} MiB{self._split()}",
                f"  time       {spent}",
                *self._variants(),
                *missing,
            )
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the lines of the report as a table."""
        head, *lines = map(html.escape, str(self).split("\n"))
        rows = []
        for line in lines:
            name, _, text = line.strip().partition(" ")
            cells = f'<th style="text-align:left">{name}</th><td style="text-align:left">{text.strip()}</td>'
            rows.append(f"<tr>{cells}</tr>")
        return f"<table><caption><b>{head}</b></caption>{''.join(rows)}</table>"

    def _calls(self) -> list[str]:
        """A line that says who ran what, where there was something."""
        if not self.engine_calls + self.pytorch_calls + self.unreached_steps:
            return []
        steps = f", {self.unreached_steps} optimizer steps without a call" if self.unreached_steps else ""
        return [f"  calls      {self.engine_calls} in the engine, {self.pytorch_calls} in PyTorch{steps}"]

    def _layers(self) -> list[str]:
        """A line for each layer, where there is more than the module itself."""
        lines = [f"  layer      {line}" for line in layer_lines(self.layers)]
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = [f"  layer      and {len(lines) - MOST_LINES} more"]
        return lines if len(self.layers) > 1 else []

    def _sharded(self) -> list[str]:
        """A line about the submodules that FSDP2 shards."""
        if not self.sharded:
            return []
        refused = [f"{path} ({report.fallback})" for path, report in self.sharded.items() if not report.captured]
        rest = f"; PyTorch runs {', '.join(refused)}" if refused else ""
        count = len(self.sharded) - len(refused)
        share = f"{self.weights_in_engine:.0%} of the weights are in the engine"
        return [f"  sharded    {count} submodules are graphs of their own, between collectives{rest}; {share}"]

    def _parts(self) -> list[str]:
        """Lines about them."""
        lines = []
        for path, part in self.parts.items():
            calls = f"{part.engine_calls} calls in the engine, {part.pytorch_calls} in PyTorch"
            lines.append(f"  part       {path}: {calls}{f' ({part.fallback})' if part.fallback else ''}")
            lines += [f"  part       {path}.{line.removeprefix('  part       ')}" for line in part._parts()]
        return lines

    def _split(self) -> str:
        """Of the step with the peak."""
        if self.peak is None:
            return ""
        parts = ("parameters", "gradients", "inputs", "outputs")
        beside = ", ".join(f"{name} {in_units(getattr(self.peak, name))}" for name in parts)
        activations, workspace = in_units(self.peak.activations), in_units(self.peak.workspace)
        return f" (activations {activations}, workspace {workspace}), beside {beside}"

    def _variants(self) -> list[str]:
        """Lines about them, where there are more than one."""
        if len(self.variants) < 2:
            return []
        took = f"{self.capture_seconds:.2f} s, {self.first_capture_seconds:.2f} s of it for the first graph"
        lines = [f"  captures   took {took}, beside {self.step_seconds:.2f} s in steps"]
        lines += [f"  variant    {variant}" for variant in self.variants[:MOST_VARIANTS]]
        if len(self.variants) > MOST_VARIANTS:
            lines.append(f"  variant    and {len(self.variants) - MOST_VARIANTS} more")
        return lines


def explain(model: Any) -> Report:
    """How ``model``, an ORTModule, is run: print it, or read its fields."""
    owner: Dispatcher = dispatcher_of(model) or model
    if not hasattr(owner, "fallback"):
        raise ArgumentTypeError(f"explain() wants an ORTModule, not {type(model).__name__}")
    tree = None if owner.states.latest is None else owner.states.latest.tree
    units = {} if tree is None else {path: explain(unit) for path, unit in owner.units(tree).items()}
    nodes = owner.latest.capture.trace.nodes if owner.latest is not None and owner.fallback.reason is None else None
    parts = {path: explain(part) for path, part in owner.parts.found(nodes is None).items()}
    inside = _weights_in_engine(owner.module, units | parts, None if nodes is None else owner.latest)
    graphs = [graph for variants in owner.graphs.values() for graph in variants]
    sessions = [session for graph in graphs for session in graph.sessions()]
    seconds = owner.compiler.seconds | {"plan": sum(session.plan_seconds for session in sessions)}
    if owner.tuning is not None:
        seconds["tune"] = owner.tuning.seconds
    owner.refusals.listen()
    name, reason, graph = type(owner.module).__name__, owner.fallback.reason, owner.latest
    always: dict[str, Any] = {
        "exports": owner.compiler.exports,
        "seconds": seconds,
        "variants": _variants(owner.budget),
        "capture_seconds": owner.budget.seconds,
        "first_capture_seconds": owner.budget.first,
        "step_seconds": owner.budget.steps,
        "missing": torch_private.missing(),
        "sharded": units,
        "parts": parts,
        "weights_in_engine": inside,
        "engine_calls": owner.usage.engine,
        "pytorch_calls": owner.usage.pytorch,
        "unreached_steps": owner.usage.unreached,
    }
    if graph is None or reason is not None:
        return Report(name, False, reason, **always)
    peak = peak_so_far(graphs)
    counted = any(plan.bounded for session in sessions for plan in session.plans.values())
    plans = [next(reversed(part.plans.values())).plan for part in graph.parts() if part.plans]
    nodes = nodes or []
    fused = graph.capture.replaced | sum((Counter(plan.fired) for plan in plans), Counter())
    return Report(
        name,
        True,
        None,
        aten_ops=sorted({n for plan in plans for n in plan.through_torch} | {n for node in nodes for n in node.aten}),
        python_ops=sorted({node.name for node in nodes if node.kind != "aten" and node.name not in units}),
        breaks=sorted({node.name for node in nodes if node.breaks and node.name not in units}),
        fused=fused,
        sparsity=_sparsity(owner, {node.op_type for node in graph.capture.model.graph.node}, fused, counted),
        nodes_exported=len(graph.capture.model.graph.node),
        nodes_run=sum(sum(plan.nodes) for plan in plans),
        layers=layers_of(graph.parts(), plans),
        plans=sum(session.plans_made for session in sessions),
        peak_bytes=0 if peak is None else peak.arena,
        peak=peak,
        cuda_graphs=_core.cuda_graphs()[0],
        refused=list(owner.refusals.list),
        tuned=owner.tuning.products if owner.tuning is not None else 0,
        tuned_convolutions=owner.tuning.convolutions if owner.tuning is not None else 0,
        **always,
    )


def _weights_in_engine(module: nn.Module, units: dict[str, Report], graph: CompiledGraph | None) -> float:
    """``units``: the submodules with graphs of their own. ``graph``: the module's own; None: PyTorch runs all but the
    units."""
    sizes = weights(module.modules())
    if not any(sizes.values()):  # none, or none that this process has
        return float(graph is not None)
    own: set[int] = set()
    if graph is not None:
        nodes = [node for node in graph.capture.trace.nodes if node.kind == "module"]
        left = {id(m) for node in nodes for m in module.get_submodule(node.name).modules()}
        own = set(weights(m for m in module.modules() if id(m) not in left))  # tied ones, too, if one of two is there
        named = dict(module.named_parameters(remove_duplicate=False))
        own -= {id(named.get(path)) for path in _only_in_pytorch(graph.capture.model)}
    inside: float = sum(sizes[key] for key in own)
    for path, report in units.items():
        found = {id(p): sizes[id(p)] for p in module.get_submodule(path).parameters() if id(p) in sizes}
        inside += report.weights_in_engine * sum(size for key, size in found.items() if key not in own)
    return inside / sum(sizes.values())


#: ONNX operators that look up rows of their first operand.
_LOOKS_UP = {"Gather", "Embedding"}


def _only_in_pytorch(model: onnx.ModelProto) -> set[str]:
    """Paths of what functions compute with that PyTorch runs, and nothing else. To look rows up is not to compute."""
    there: dict[bool, set[str]] = {False: set(), True: set()}
    for node in model.graph.node:
        there[node.op_type == "PythonOp"].update(node.input[node.op_type in _LOOKS_UP :])
    return {name.removeprefix(STATE) for name in there[True] - there[False] if name.startswith(STATE)}


_LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}


def _sparsity(owner: Dispatcher, operators: set[str], fused: dict[str, int], counted: bool) -> list[str]:
    """A sentence for labels and one for padding, where the module has an embedding or a loss. ``counted``: a step has
    counted the rows that matter, of labels or of a mask."""
    config, found = owner.config, []
    embeds = any(isinstance(module, nn.Embedding) for module in owner.module.modules())
    has_loss, has_attention = bool(_LOSSES & operators), "Softmax" in operators
    if has_loss or embeds:
        sure = None if embeds and has_attention else counted
        found.append(f"labels: {_labels(config, has_loss, 'label_sparsity' in fused, sure)}")
    if embeds:
        found.append(f"padding: {_padding(config, has_attention, 'padding_removal' in fused)}")
    return found


def _labels(config: Config, has_loss: bool, fired: bool, counted: bool | None) -> str:
    if not (config.enable_sparse_optimizer and config.enable_label_sparse_optimizer):
        return "all rows are computed, as ENABLE_SPARSE_OPTIMIZER or ENABLE_LABEL_SPARSE_OPTIMIZER is 0"
    if fired:
        return "rows with ignored labels are not computed"
    if not has_loss:
        return "all rows are computed, as the loss is not in the graph (ModuleWithLoss puts it there)"
    ignored = "none has an ignored label, or too few have one to pay"
    other = "there are too few of them to pay, or more than the loss looks at them"
    return f"all rows are computed, as {f'{ignored}, {other}' if counted is None else ignored if counted else other}"


def _padding(config: Config, has_attention: bool, fired: bool) -> str:
    if not config.enable_sparse_optimizer or config.enable_embedding_sparse_optimizer == "0":
        return "all tokens are computed, as ENABLE_SPARSE_OPTIMIZER or ENABLE_EMBEDDING_SPARSE_OPTIMIZER is 0"
    if fired:
        return "tokens that attention's mask hides are not computed"
    if not has_attention:
        return "all tokens are computed, as there is no attention whose mask tells which are padding"
    return (
        "all tokens are computed, as the mask hides none, or too few to pay, or as results have a row for each, which "
        "ENABLE_EMBEDDING_SPARSE_OPTIMIZER=1 lets be 0 for padding"
    )


def _variants(budget: Budget) -> list[VariantReport]:
    """Those with a graph by their time, then those that wait."""
    found = sorted(budget.graphs, key=lambda variant: -variant.seconds)
    found += sorted((v for v in budget.waiting if v.waited), key=lambda variant: -variant.eager)
    return [_variant(budget, variant) for variant in found]


def _variant(budget: Budget, variant: Variant) -> VariantReport:
    there = budget.pytorch_seconds(variant) if variant.runs else None
    return VariantReport(
        variant.what,
        variant.captured,
        variant.capture,
        variant.runs,
        variant.seconds,
        variant.waited,
        variant.eager,
        None if there is None else there - variant.seconds,
    )
