"""Finds the first operator that computes something else than PyTorch.

The graph is cut into two halves. For results, the first half runs in the engine, and its values at the cut are compared
with those of `onnx_interpreter.py`; for gradients the second half runs from the interpreter's values at the cut, and
the gradients that leave it are compared. All values go from one half to the other through the cut, so bisection finds
the operator in log2(nodes) runs. Each half keeps the engine's fusions: for a fused operator the last node is named for
results, the first for gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import numpy_helper

from ortmodule.core.dtypes import TORCH_TYPES
from ortmodule.core.errors import Unknown
from ortmodule.core.onnx_utils import OF_SIZES, attributes, constants, without_dead
from ortmodule.core.tolerance import TOLERANCE, MovedElements
from ortmodule.debug import onnx_interpreter
from ortmodule.engine.session import ENGINE_ERRORS, Session

#: Gradients may be apart by the tolerance of this tensor's largest element, or by this share of that of all.
SHARE = 1e-2

#: Operators before the one that was found that are looked at once more.
NEAR = 8


def difference(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0, least: float = 0.0,
               moved: MovedElements | None = None) -> str:  # fmt: skip
    """How far two tensors are apart if it is too far, or an empty string.

    ``scale``: elements count as at least so large. ``least``: the tolerance, if that of the type is below. ``moved``:
    how far each element may be off besides.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found, expected)]
        return "is {}, not {}".format(*kinds)
    tolerance = TOLERANCE.get(expected.dtype)
    if tolerance is None:
        return "" if torch.equal(found, expected) else "is not the same"
    if not expected.numel():
        return ""
    found, expected = found.detach().double(), expected.detach().double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return "is not finite in the same places"
    distance = (found - expected).nan_to_num(posinf=0.0, neginf=0.0).abs()
    off = (distance if moved is None or moved.by is None else (distance - moved.by).clamp(min=0)).max().item()
    tolerance = max(tolerance, least)
    largest = max(expected.nan_to_num(posinf=0.0, neginf=0.0).abs().max().item(), scale)
    return "" if off <= tolerance * largest + 1e-30 else f"is off by {off:.3g} of {largest:.3g}"


def share(gradients: Sequence[torch.Tensor | None]) -> float:
    """The size at which elements of a gradient begin to matter beside all these."""
    return SHARE * max((g.detach().abs().max().item() for g in gradients if g is not None and g.numel()), default=0.0)


# --- the graph --------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One run of a graph: its inputs by name, which of them need a gradient, and what was drawn."""

    model: onnx.ModelProto
    feeds: dict[str, torch.Tensor]
    needs: dict[str, bool]
    seed: int
    values: Sequence[Any]  # of rng_replay.RandomValue

    @functools.cached_property
    def tolerance(self) -> float:
        """For all that is computed: that of the narrowest type of a float in it."""
        types = {tensor.dtype for tensor in self.feeds.values()}
        for node in self.model.graph.node:
            if node.op_type == "Cast":
                types |= {dtype for dtype in [TORCH_TYPES.get(attributes(node)["to"])] if dtype is not None}
        return max((TOLERANCE[dtype] for dtype in types & TOLERANCE.keys()), default=0.0)


class _Cuts:
    """A graph that is cut after its nodes, one after the other. Every value of it is known from the reference."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, without_dead(case.model)
        self.nodes = [node for node in self.model.graph.node if node.op_type != "Constant"]
        self.constants = constants(self.model)
        self.outputs = [value.name for value in self.model.graph.output]
        self.drawn = {value.node.output[0]: value.tensor for value in case.values}
        self.values = {**self.constants, **case.feeds}
        self.unknown: list[str] = []
        self._evaluate()
        self.fixed, self.needs = set(self.constants), {name for name, need in case.needs.items() if need}
        for node in self.nodes:
            names = [name for name in node.input if name]
            if node.op_type in OF_SIZES or (names and self.fixed.issuperset(names) and node.op_type != "Dropout"):
                self.fixed |= set(node.output)
            if self.needs.intersection(names) and node.op_type not in ("StopGradient", "Shape"):
                self.needs |= {name for name in node.output if name and self.values[name].is_floating_point()}

        #: Positions of the nodes that run: all but the arithmetic of shapes.
        self.steps = [i for i, node in enumerate(self.nodes) if not self.fixed.issuperset(filter(None, node.output))]

    def _evaluate(self) -> None:
        """All values; those of an operator that the reference does not know are the engine's."""
        while True:
            try:
                with torch.no_grad():
                    onnx_interpreter.evaluate(self.nodes, self.values, self.drawn)
                return
            except Unknown as error:
                node = next(n for n in self.nodes if not any(name in self.values for name in n.output if name))
                self.unknown.append(str(error))
                names = [name for name in node.output if name]
                self.values |= zip(names, self.run_first(len(self.nodes), names), strict=True)

    def crossing(self, at: int) -> list[str]:
        """The names of what the nodes before ``at`` compute for those from there on, for the caller and for buffers."""
        used = {name for node in self.nodes[at:] for name in node.input} | set(self.outputs)
        used |= {name for node in self.nodes[:at] for name in _moments(node)}
        return [name for node in self.nodes[:at] for name in node.output if name and name in used]

    def _part(self, nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], fixed: dict[str, torch.Tensor]) -> Session:
        """A graph of ``nodes``; names that none of them computes are its inputs, or constants if they are fixed."""
        part = onnx.ModelProto()
        part.CopyFrom(self.model)
        for field in ("node", "initializer", "input", "output", "value_info"):
            part.graph.ClearField(field)
        part.graph.node.extend(nodes)
        made = {name for node in nodes for name in node.output}
        used = {name for node in nodes for name in node.input if name} | set(outputs)
        for name in sorted(used - made):
            if name in fixed:
                part.graph.initializer.append(_proto(name, fixed[name]))
            else:
                value = self.values[name]
                kind = next(onnx_type for onnx_type, dtype in TORCH_TYPES.items() if dtype == value.dtype)
                part.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, list(value.shape)))
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return Session(part.SerializeToString())

    def run_first(self, at: int, names: Sequence[str], training: bool = False) -> list[torch.Tensor]:
        """What the engine computes for ``names`` with the nodes before ``at``."""
        session = self._part(self.nodes[:at], names, self.constants)
        tensors = [self.values[name].contiguous() for name in session.inputs]
        needs = [training and self.case.needs.get(name, False) for name in session.inputs]
        grads = [self.values[name].is_floating_point() for name in names] if training else None
        return session.run(tensors, needs, grads, self.case.seed).outputs

    def first_is_wrong(self, at: int) -> bool:
        names = self.crossing(at)
        try:
            found = self.run_first(at, names, training=any(self.case.needs.values()))
        except ENGINE_ERRORS:  # a plan with gradients of values that have none
            found = self.run_first(at, names)
        scales = self._scales(at)
        return any(
            difference(ours, self.values[name], scales.get(name, 0.0), self.case.tolerance)
            for ours, name in zip(found, names, strict=True)
        )

    def _scales(self, at: int) -> dict[str, float]:
        """How large the numbers are that running means of the nodes before ``at`` move to the mean of."""
        moving = [(node, 1 - attributes(node).get("momentum", 0.9)) for node in self.nodes[:at] if _moments(node)]
        return {node.output[1]: share * self.values[node.input[0]].abs().max().item() for node, share in moving}

    def second_is_wrong(self, at: int, given: dict[int, torch.Tensor]) -> bool:
        """``given``: gradients by the number of the graph's output."""
        nodes, outputs = self.nodes[at:], [self.outputs[i] for i in given]
        # As many numbers are drawn before as in the whole graph: masks depend on it.
        first = {name for node in self.nodes[:at] for name in node.output}
        earlier = [f"drawn/{i}" for i in range(sum(name in first for name in self.drawn))]
        padding = [onnx.helper.make_node("Dropout", ["drawn", "drawn/ratio", "drawn/on"], [name]) for name in earlier]
        fixed = {**self.constants, "drawn/ratio": torch.tensor(0.5), "drawn/on": torch.tensor(True)}
        self.values["drawn"] = torch.ones(1)
        fixed |= {name: self.values[name] for name in self.fixed if name in first}
        session = self._part([*padding, *nodes], outputs + earlier, fixed)
        leaves = {name: self.values[name].detach() for name in session.inputs if name in self.needs}
        grads = [g.contiguous() for g in given.values()]

        with torch.enable_grad():
            for leaf in leaves.values():
                leaf.requires_grad_()
            values = {**{n: v for n, v in self.values.items() if n in self._begin(nodes)}, **leaves}
            onnx_interpreter.evaluate(nodes, values, self.drawn)
            used = [(values[name], g) for name, g in zip(outputs, grads, strict=True) if values[name].requires_grad]
            if not used:
                return False
            results, used_grads = zip(*used, strict=True)
            expected = torch.autograd.grad(results, list(leaves.values()), used_grads, allow_unused=True)
        tensors = [self.values[name].detach().contiguous() for name in session.inputs]
        flags = [True] * len(outputs) + [False] * len(earlier)
        run = session.run(tensors, [name in leaves for name in session.inputs], flags, self.case.seed)
        found = dict(zip(session.inputs, run.backward([*grads, *[None] * len(earlier)]), strict=True))
        scale = share(expected)
        for name, theirs in zip(leaves, expected, strict=True):
            ours = found[name]
            if ours is not None and (theirs is not None or ours.any()):
                theirs = torch.zeros_like(ours) if theirs is None else theirs
                if difference(ours, theirs, scale, self.case.tolerance):
                    return True
            elif theirs is not None and theirs.any():
                return True
        return False

    def _begin(self, nodes: Sequence[onnx.NodeProto]) -> set[str]:
        """The names of what ``nodes`` use and do not compute."""
        made = {name for node in nodes for name in node.output}
        return ({name for node in nodes for name in node.input} | set(self.outputs)) - made


def _moments(node: onnx.NodeProto) -> list[str]:
    """The new running mean and variance, if ``node`` is a normalization that moves them."""
    moves = node.op_type == "BatchNormalization" and attributes(node).get("training_mode")
    return list(node.output[1:3]) if moves else []


def _proto(name: str, value: torch.Tensor) -> onnx.TensorProto:
    if value.dtype is torch.bfloat16:
        kind = onnx.TensorProto.BFLOAT16
        return onnx.helper.make_tensor(name, kind, list(value.shape), value.float().reshape(-1).tolist())
    return numpy_helper.from_array(value.detach().cpu().contiguous().numpy(), name)


# --- the search -------------------------------------------------------------------------------------------------------


def forward(case: Case) -> str:
    """A sentence that names the first operator whose result differs."""

    def find(cuts: _Cuts) -> int | None:
        found = _first(lambda k: cuts.first_is_wrong(cuts.steps[k - 1] + 1), len(cuts.steps))
        return None if found is None else cuts.steps[found - 1]

    return _search(case, find, "result")


def backward(case: Case, given: dict[int, torch.Tensor]) -> str:
    """A sentence that names the first operator, going backward, whose gradient differs. ``given``: the gradients of
    the graph's outputs."""

    def find(cuts: _Cuts) -> int | None:
        found = _first(lambda k: cuts.second_is_wrong(cuts.steps[-k], given), len(cuts.steps))
        return None if found is None else cuts.steps[-found]

    return _search(case, find, "gradient")


def _search(case: Case, find: Callable[[_Cuts], int | None], what: str) -> str:
    try:
        cuts = _Cuts(case)
        index = find(cuts)
    except Unknown as error:
        return f"which operator is not known: there is no other {error} to compare with"
    except ENGINE_ERRORS as error:
        return f"which operator is not known: a part of the graph does not run ({error})"
    if index is not None:
        node = cuts.nodes[index]
        return f"the first operator whose {what} differs is {node.op_type} {node.name}"
    rest = f", {', '.join(sorted(set(cuts.unknown)))} aside" if cuts.unknown else ""
    return f"every operator computes what ONNX says it does{rest}: the graph is not what the module does"


def _first(is_wrong: Callable[[int], bool], n: int) -> int | None:
    """The least k from 1 to ``n`` that is wrong, where all above it are; None if ``n`` is right."""
    if n == 0 or not is_wrong(n):
        return None
    low, high = 0, n  # low is right, high is wrong
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_wrong(middle) else (middle, high)
    # An operator may hide from some cuts what is wrong before it, as a mask does: then low is not the last that is.
    return next((k for k in range(max(1, high - NEAR), high) if is_wrong(k)), high)
