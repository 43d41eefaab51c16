"""Splits the memory of a step at its peak: parameters, gradients, activations, workspace, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ortmodule import _core
from ortmodule.core.errors import ArgumentError
from ortmodule.engine.memory_goal import Spec, bytes_of
from ortmodule.guards.inventory import Slot
from ortmodule.runtime.compiled_graph import CompiledGraph

#: Tensors as large as the parameter that an optimizer keeps for each, by its name.
OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2, "lamb": 2,
              "amsgrad": 3}  # fmt: skip
MOST_LISTED = 10  # tensors that a printed peak lists
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that is alive at the peak of a step."""

    kind: str  #: parameter, input, output, gradient, activation, workspace, gaps or optimizer
    module: str  #: path of the submodule that it belongs to, or that computes it; "": of the module itself
    name: str  #: of a parameter; the operator that computes it
    bytes: int
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        spec = f" {self.dtype}{list(self.shape)}" if self.dtype else ""
        return f"{in_units(self.bytes)} {self.kind} {'.'.join(filter(None, (self.module, self.name)))}{spec}"


@dataclass(frozen=True)
class Peak:
    """The bytes of a step (forward, backward) when they are the most, known from its plan.

    ``str()`` of it is a table with the largest tensors.
    """

    parameters: int  #: and buffers
    inputs: int
    outputs: int  #: what forward returns and writes, and the gradients that backward is given for it
    gradients: int  #: of parameters, and of inputs that have some, as far as they are there at the peak
    activations: int  #: values that forward and backward compute and keep
    workspace: int  #: scratch memory of kernels, and gaps between blocks
    optimizer: int  #: states of the optimizer
    recomputed: int = 0  #: values that backward computes again
    extra_work: float = 0.0  #: by which share that, and what is offloaded, adds to the work of a step, estimated
    offloaded: int = 0  #: bytes in a file, or on a GPU in memory of the host, beside all of these (``total``)
    block: int = 0  #: of the one block of memory that the engine takes for a step, with the gradients that are in it
    alive: int = 0  #: the most bytes in it that are needed at one time: no placement takes less
    torch: int = 0  #: that torch takes for itself while it runs a part of the step, as convolutions on the CPU; about
    tensors: list[HeldTensor] = field(default_factory=list, repr=False)  #: all of it, the largest first

    @property
    def total(self) -> int:
        held = self.parameters + self.inputs + self.outputs + self.gradients + self.arena + self.optimizer
        return held + self.torch

    @property
    def arena(self) -> int:
        """Activations and workspace: the one block of memory that the engine takes for a step. On the CPU large
        gradients are in it, too."""
        return self.activations + self.workspace

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "activations", "workspace", "optimizer", "inputs", "outputs")
        lines = [f"peak         {in_units(self.total)}"]
        lines += [f"{part:<13}{in_units(getattr(self, part))}" for part in parts]
        if self.torch:
            lines.append(f"{'torch':<13}{in_units(self.torch)}")
        if self.recomputed:
            lines.append(f"recomputed   {self.recomputed} values, {100 * self.extra_work:.1f} % more work")
        if self.offloaded:
            lines.append(f"offloaded    {in_units(self.offloaded)} more, {100 * self.extra_work:.1f} % more work")
        lines += [f"  {tensor}" for tensor in self.tensors[:MOST_LISTED]]
        if len(self.tensors) > MOST_LISTED:
            rest = sum(tensor.bytes for tensor in self.tensors[MOST_LISTED:])
            lines.append(f"  {in_units(rest)} in {len(self.tensors) - MOST_LISTED} more")
        return "\n".join(lines)


def in_units(count: int) -> str:
    """``count`` bytes, as "1.5 GiB"."""
    unit = min(len(_UNITS) - 1, max(0, count.bit_length() - 1) // 10)
    return f"{count / 1024**unit:.{1 if unit else 0}f} {_UNITS[unit]}"


def peak_of(
    graph: CompiledGraph,
    specs: Sequence[Spec],
    plan: _core.Plan,
    optimizer: str | torch.optim.Optimizer = "none",
) -> Peak:
    """Of a step of ``graph`` with inputs of these types and shapes that runs by ``plan``. ``optimizer``: see
    :func:`ortmodule.memory.predict`."""
    states = _states(graph)
    held = [HeldTensor("parameter", *_place(name), t.nbytes, _dtype(t), tuple(t.shape)) for name, t in states]
    joint = graph.joint(plan)
    grads, later = _gradients(graph, plan, plan.peak(True)[0] if joint else None)
    with_grad = {(tensor.module, tensor.name) for tensor in (*grads, *later)}  # an optimizer passes over the others
    trained = [(n, t) for n, t in states if t.requires_grad and (not plan.differentiates or _place(n) in with_grad)]
    held += [*grads, *_optimizer(trained, optimizer)]
    held += [
        _of_spec("input", f"input {feed}", specs[i]) for i, feed in enumerate(graph.feeds) if isinstance(feed, int)
    ]
    given = [spec for spec in plan.output_grads if spec is not None] if plan.differentiates else []
    results = [*plan.outputs, *(spec for _, spec in plan.writes), *given]
    held += [_of_spec("output", f"output {i}", spec) for i, spec in enumerate(results)]
    in_arena = sum(bytes_of(spec) for spec in plan.input_grads if spec is not None) if joint else 0
    held += _arena(plan, joint, in_arena - sum(tensor.bytes for tensor in later))
    sums = dict.fromkeys(
        ("parameter", "input", "output", "gradient", "activation", "workspace", "gaps", "optimizer"), 0
    )
    for tensor in held:
        sums[tensor.kind] += tensor.bytes
    held.sort(key=lambda tensor: -tensor.bytes)
    recomputed, extra = plan.recomputed
    return Peak(
        sums["parameter"],
        sums["input"],
        sums["output"],
        sums["gradient"],
        sums["activation"],
        sums["workspace"] + sums["gaps"],
        sums["optimizer"],
        recomputed,
        extra,
        plan.offload_bytes,
        plan.joint_bytes if joint else plan.arena_bytes,
        plan.peak(joint)[1],
        plan.torch_bytes,
        [tensor for tensor in held if tensor.bytes],
    )


def peak_so_far(graphs: Sequence[CompiledGraph]) -> Peak | None:
    """The largest of all plans that these graphs, and those of other lengths, have run by; None: they have none."""
    found = [_peak_of_parts(graph) for first in graphs for graph in (first, *first.other_lengths())]
    return max((peak for peak in found if peak is not None), key=lambda peak: peak.total, default=None)


def _peak_of_parts(graph: CompiledGraph) -> Peak | None:
    """Of its parts together, which hold what backward needs at the same time."""
    peaks = []
    for part in graph.parts():
        largest = max(
            (s.largest for s in part.own_sessions() if s.largest), key=lambda p: p[0].arena_bytes, default=None
        )
        if largest is not None:
            peaks.append(peak_of(part, largest[1], largest[0]))
    if len(peaks) < 2:
        return peaks[0] if peaks else None
    tensors = peaks[0].tensors + [t for peak in peaks[1:] for t in peak.tensors if t.kind != "parameter"]
    sums = {f.name: sum(getattr(peak, f.name) for peak in peaks) for f in fields(Peak) if f.name != "tensors"}
    sums["parameters"] = peaks[0].parameters
    return Peak(**sums, tensors=sorted(tensors, key=lambda tensor: -tensor.bytes))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_spec(kind: str, name: str, spec: Spec) -> HeldTensor:
    return HeldTensor(kind, "", name, bytes_of(spec), *spec)


def _place(name: str) -> tuple[str, str]:
    """ "layers.0.weight" -> ("layers.0", "weight")."""
    module, _, last = name.rpartition(".")
    return module, last


def _states(graph: CompiledGraph) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors of the module, each once."""
    found = {id(slot.get()): (slot.name, slot.get()) for slot in reversed(list(graph.tree.slots.values()))}
    return list(reversed(found.values()))


def _gradients(graph: CompiledGraph, plan: _core.Plan, at: int | None) -> tuple[list[HeldTensor], list[HeldTensor]]:
    """Those that are there at instruction ``at``, and those that are made later. None: all are there."""
    grads = graph.predicted()
    if grads is None or not plan.differentiates:
        return [], []
    found: list[HeldTensor] = []
    later: list[HeldTensor] = []
    reached, lives = graph.reached(grads), plan.gradient_lives
    for i in graph.leaves:
        spec, feed = plan.input_grads[i], graph.feeds[i]
        if spec is None and i in reached and isinstance(feed, Slot):  # zeros, as PyTorch has them
            tensor = feed.get()
            spec = _dtype(tensor), tuple(tensor.shape)
        if spec is not None:
            name = feed.name if isinstance(feed, Slot) else f"input {feed}"
            life = lives[i]
            to = later if at is not None and life is not None and life[0] > at else found
            to.append(HeldTensor("gradient", *_place(name), bytes_of(spec), *spec))
    return found, later


def _optimizer(trained: Sequence[tuple[str, torch.Tensor]], optimizer: str | torch.optim.Optimizer) -> list[HeldTensor]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return [HeldTensor("optimizer", *_place(name), count) for name, t in trained if (count := _kept(optimizer, t))]
    if optimizer not in OPTIMIZERS:
        raise ArgumentError(f"optimizer={optimizer!r}: it is an optimizer, or one of {', '.join(OPTIMIZERS)}")
    return [HeldTensor("optimizer", *_place(n), OPTIMIZERS[optimizer] * t.nbytes) for n, t in trained]


#: For classes whose name does not say it: what of a group's settings says how much is kept.
_BY_SETTINGS: dict[str, Callable[[dict[str, Any]], int]] = {
    "sgd": lambda group: int(bool(group.get("momentum"))),
    "rmsprop": lambda group: 1 + bool(group.get("momentum")) + bool(group.get("centered")),
}


def _kept(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> int:
    """Bytes that it keeps, or will, of this parameter."""
    there = [value for value in optimizer.state.get(param, {}).values() if isinstance(value, torch.Tensor)]
    if there:
        return sum(value.nbytes for value in there)
    kind = type(optimizer).__name__.lower().removeprefix("fused").removeprefix("hf")
    for group in optimizer.param_groups:
        if any(each is param for each in group["params"]):
            if kind not in OPTIMIZERS:
                raise ArgumentError(
                    f"what {type(optimizer).__name__} keeps is known after its first step: take one of a small model, "
                    f"or one of {', '.join(OPTIMIZERS)}"
                )
            count = _BY_SETTINGS.get(kind, lambda group: OPTIMIZERS[kind] + bool(group.get("amsgrad")))(group)
            wide = type(optimizer).__module__.startswith("ortmodule.")  # whose states are float32
            return count * (math.prod(param.shape) * 4 if wide else param.nbytes)
    return 0


# --- the arena --------------------------------------------------------------------------------------------------------


def _arena(plan: _core.Plan, joint: bool, gradients: int) -> list[HeldTensor]:
    """What is alive in it at its peak, and the gaps. ``gradients``: bytes of those that are in it then."""
    at, _ = plan.peak(joint)
    held = []
    for _, count, first, last, (kind, operator, name, part, spec) in plan.blocks(joint):
        if first <= at <= last and kind != "gradient":
            module = module_path(name)
            what = f"gradient at {operator}" if part == "backward" else operator
            held.append(
                HeldTensor("activation", module, what, count, *spec)
                if kind == "value" and spec is not None
                else HeldTensor("workspace", module, operator or "fixed", count)
            )
    arena = plan.joint_bytes if joint else plan.arena_bytes
    rest = arena + plan.constant_bytes - gradients - sum(tensor.bytes for tensor in held)
    return [*held, HeldTensor("gaps", "", "between blocks", rest)]


def module_path(name: str) -> str:
    """ "/layers/layers.0/norm/Add" -> "layers.0.norm": the submodule that a node is of, by the node's name."""
    return _core.module_path(name)
