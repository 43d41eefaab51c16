"""Writes a report of a module as one HTML page: its graph, its memory, its time, its variants."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch
from torch import nn

from ortmodule import _core
from ortmodule.core.errors import ArgumentError, ArgumentTypeError, DoesNotHold, MissingPackageError, NotInEngine
from ortmodule.core.names import VERSION
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.onnx_utils import without_dead
from ortmodule.core.pytree import as_arguments
from ortmodule.core.settings.safe_files import write_whole
from ortmodule.debug.explain import Report, explain
from ortmodule.debug.memory.peak import in_units, module_path, peak_of
from ortmodule.debug.plots import Figure, pareto_figure, plan_figure, time_figure
from ortmodule.debug.profile import EXPORTED, PlanNode, Profile, nodes_of
from ortmodule.debug.step_stats import input_names, padded_inputs, valid_elements
from ortmodule.host.host_node import HOST_OPERATORS
from ortmodule.runtime.compiled_graph import CompiledGraph
from ortmodule.runtime.dispatcher import Dispatcher

TEMPLATE = "report.html"
NEEDS = "report() draws with plotly and jinja2, and {} is not installed: pip install plotly jinja2"
MOST_CULPRITS, MOST_TIMES = 20, 15  # rows of tables


class Row(NamedTuple):
    """A node as the page shows it."""

    anchor: str  # an id in the page; "": none
    operator: str
    result: str  # numbers or names, type and shape
    operands: list[tuple[str, str]]  # (text, anchor or "")
    marks: list[str]  # fused, recomputed, island, view, removed
    made_by: str
    seconds: float | None


@dataclass
class Layer:
    """A submodule with its nodes and its own submodules."""

    name: str
    rows: list[Row] = field(default_factory=list)
    layers: dict[str, Layer] = field(default_factory=dict)

    def at(self, path: str) -> Layer:
        layer = self
        for step in filter(None, path.split(".")):
            layer = layer.layers.setdefault(step, Layer(step))
        return layer

    @property
    def all_rows(self) -> list[Row]:
        return [*self.rows, *(row for layer in self.layers.values() for row in layer.all_rows)]

    @property
    def counts(self) -> dict[str, int]:
        """How many of its nodes have each mark."""
        found: dict[str, int] = {}
        for mark in [mark for row in self.all_rows for mark in row.marks]:
            found[mark] = found.get(mark, 0) + 1
        return found

    @property
    def seconds(self) -> float | None:
        spent = [row.seconds for row in self.all_rows if row.seconds is not None]
        return sum(spent) if spent else None


@dataclass
class Part:
    """A graph of the module, as it was exported and as it runs."""

    title: str
    before: Layer
    forward: Layer
    backward: Layer
    figures: list[Figure]
    culprits: list[Any]  # HeldTensor
    peak: Any  # Peak


def report(
    model: nn.Module,
    path: str | Path,
    sample: Any = None,
    *,
    profile: Profile | None = None,
    prices: Sequence[Any] = (),
    optimizer: str | torch.optim.Optimizer = "none",
) -> Path:
    """Writes one HTML page about ``model``, an ORTModule, that opens without a network; returns its path.

    It shows the graph before and after optimization by layers, the memory plan of a step with what is alive at its
    peak, and the variants of the module with what told them apart.

    ``sample``: a tuple of arguments, a dictionary of those with names, or one argument: the step that is shown, planned
    without running where it has not run, and whose density of tokens and labels is counted. None: the latest step.
    ``profile``: a finished :func:`ortmodule.profile`: the time of each node. ``prices``: of
    :func:`ortmodule.memory.pareto`: what smaller budgets cost. ``optimizer``: whose states count in the peak.

    Needs plotly and jinja2: ImportError where one is missing. Raises TypeError for another module, ValueError where no
    step has run and there is no sample, UnsupportedError where PyTorch would run the sample.
    """
    owner: Dispatcher | None = dispatcher_of(model)
    if owner is None:
        raise ArgumentTypeError(f"report() wants an ORTModule, not {type(model).__name__}")
    jinja2, plotly_js = _libraries()
    call, graph = None, owner.latest
    if sample is not None:
        try:
            graph, call = owner.prepare(*as_arguments(sample))
        except (DoesNotHold, NotInEngine) as error:
            raise _core.UnsupportedError(f"PyTorch would run it: {error}") from error
    explained = explain(model)
    if graph is None and explained.fallback is None:
        raise ArgumentError("no step has run yet: give report() a sample, or run a step first")
    parts = [] if graph is None else list(_parts(graph, call, profile, optimizer))
    figures = [figure for part in parts for figure in part.figures]
    if profile is not None and profile.times:
        figures.append(time_figure(profile))
    if prices:
        figures.append(pareto_figure(prices, profile))
    page = _template(jinja2).render(
        name=explained.name,
        version=VERSION,
        torch=torch.__version__,
        day=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        explained=explained,
        lines=_lines(explained),
        parts=parts,
        profile=profile if profile is not None and profile.times else None,
        most_times=MOST_TIMES,
        density=[] if call is None or graph is None else list(_density(owner, graph, call)),
        has_sample=sample is not None,
        prices=prices,
        figures=_as_script([figure.for_page() for figure in figures]),
        plotly_js=plotly_js,
    )
    write_whole(Path(path), page.encode())
    return Path(path)


def _libraries() -> tuple[Any, str]:
    """jinja2, and plotly's script. Raises ImportError with a sentence where one is missing."""
    try:
        import jinja2
        import plotly.offline
    except ImportError as error:
        raise MissingPackageError(NEEDS.format(error.name), name=error.name) from error
    return jinja2, plotly.offline.get_plotlyjs()


def _template(jinja2: Any) -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {"bytes": in_units, "ms": _ms}
    return environment.get_template(TEMPLATE)


def _as_script(value: Any) -> str:
    """JSON that may stand in a script of a page."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f} ms"


def _lines(explained: Report) -> list[tuple[str, str]]:
    """The lines of the printed report, but those of variants, which have a table of their own."""
    lines = [line.strip().partition(" ") for line in str(explained).split("\n")[1:]]
    return [(name, text.strip()) for name, _, text in lines if name != "variant"]


# --- graphs -----------------------------------------------------------------------------------------------------------


def _parts(
    graph: CompiledGraph, call: Any, profile: Profile | None, optimizer: str | torch.optim.Optimizer
) -> Iterator[Part]:
    pieces = list(graph.parts())
    for number, piece in enumerate(pieces):
        found = _planned(piece, call if len(pieces) == 1 else None, profile)
        if found is None:
            continue
        shapes, plan = found
        times = None if profile is None else profile.of(plan)
        title = f"piece {number + 1} of {len(pieces)}" if len(pieces) > 1 else ""
        nodes = nodes_of(plan)
        before = _before(piece.capture.model, {node.name for node in nodes})
        anchors: dict[int, str] = {}  # of results: their node's
        for i, node in enumerate(nodes):
            anchors |= {result: f"p{number}n{i}" for result in node.results if result is not None}
        layers = {"forward": Layer(""), "backward": Layer("")}
        for node in nodes:
            seconds = times[node.instruction].mean if times is not None and node.instruction >= 0 else None
            layers[node.part].at(node.module).rows.append(_row(node, anchors, seconds))
        peak = peak_of(piece, piece.executables.specs_for(shapes), plan, optimizer)
        figures = [plan_figure(plan, f"plan{number}")]
        yield Part(title, before, layers["forward"], layers["backward"], figures, peak.tensors[:MOST_CULPRITS], peak)


def _planned(graph: CompiledGraph, call: Any, profile: Profile | None) -> tuple[tuple, _core.Plan] | None:
    """(shapes of the inputs, plan) of the step that is shown: of ``call``, or one that was measured, or the latest."""
    ready = [(key[0], found.plan) for key, found in reversed(graph.plans.items()) if not found.plan.prologue]
    if call is not None:
        ready = [(shapes, plan) for shapes, plan in ready if shapes == call.shapes]
    if profile is not None:
        ready.sort(key=lambda pair: profile.of(pair[1]) is None)  # stable
    if ready:
        return ready[0]
    return None if call is None else (call.shapes, graph.sketch(call.shapes, lambda: call.inputs))


def _row(node: PlanNode, anchors: dict[int, str], seconds: float | None) -> Row:
    marks = []
    if node.recomputed:
        marks.append("recomputed")
    if node.operator in HOST_OPERATORS:
        marks.append("island")
    if node.made_by != EXPORTED:
        marks.append("fused")
    if node.instruction < 0:
        marks.append("view")
    operands = [
        (f"%{v}", anchors.get(v, "")) if isinstance(v, int) else (v, "") for v in node.operands if v is not None
    ]
    results = ", ".join(f"%{v}" for v in node.results if v is not None)
    result = results if node.spec is None else f"{results} {node.spec[0]}{list(node.spec[1])}"
    made_by = "" if node.made_by == EXPORTED else node.made_by
    anchor = next((anchors[v] for v in node.results if v is not None), "")
    return Row(anchor, node.operator, result, operands, marks, made_by, seconds)


def _before(model: onnx.ModelProto, names: set[str]) -> Layer:
    """The exported graph by layers. ``names``: of nodes that run."""
    top = Layer("")
    for node in without_dead(model).graph.node:
        if node.op_type == "Constant":
            continue
        marks = ["island"] if node.op_type == "PythonOp" else [] if node.name in names else ["removed"]
        operands = [(name, "") for name in node.input if name]
        top.at(module_path(node.name)).rows.append(
            Row("", node.op_type, ", ".join(filter(None, node.output)), operands, marks, "", None)
        )
    return top


# --- inputs -----------------------------------------------------------------------------------------------------------


def _density(owner: Dispatcher, graph: CompiledGraph, call: Any) -> Iterator[tuple[str, str, int, int, int]]:
    """(name, kind, value that means nothing, elements that mean something, all) of tokens and labels."""
    names = input_names(owner.module, call.arguments, len(call.inputs))
    for padded in padded_inputs(graph.capture.model):
        tensor = call.inputs[padded.index]
        kind = {"EMBED": "tokens", "LABEL": "labels"}[padded.kind]
        yield names[padded.index], kind, padded.padding, int(valid_elements(padded, tensor).sum()), tensor.numel()
