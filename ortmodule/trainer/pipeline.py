"""Trains a model as a pipeline: each process runs a stage in the engine, by `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ortmodule.core.config import Config
from ortmodule.core.errors import ArgumentError, StateError
from ortmodule.core.torch_private import fake_tensor_mode
from ortmodule.module import ORTModule
from ortmodule.trainer.model_desc import Described, ModelDescription
from ortmodule.trainer.options import ORTTrainerOptions
from ortmodule.trainer.pipeline_cut import CutGraph, even_starts
from ortmodule.trainer.processes import Processes
from ortmodule.trainer.step_module import StepModule

#: Makes the context that forward runs in.
Autocast = Callable[[], AbstractContextManager[Any]]
#: Makes of the inputs and the outputs of a forward, in order, the loss that is differentiated.
LossOf = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]

#: Symbols of the axis that micro-batches are parts of.
_BATCH = ("batch", "batch_size", "N")


class Slices:
    """How a batch becomes micro-batches, and their results one: which axis of which tensor is cut."""

    def __init__(self, described: Sequence[Described], options: ORTTrainerOptions) -> None:
        sizes = options.distributed
        self.count = sizes.num_pipeline_micro_batches
        self._schema = sizes.sliced_schema
        self.axes: dict[str, int] = {}
        names = [entry.name for entry in described]
        for option in ("sliced_axes", "sliced_schema", "sliced_tensor_names"):
            for name in getattr(sizes, option):
                if name not in names:
                    raise ArgumentError(
                        f"the option distributed.{option} names {name}; described are {', '.join(names)}"
                    )
        for entry in described:
            if sizes.sliced_tensor_names and entry.name not in sizes.sliced_tensor_names or entry.is_loss:
                continue
            batch = next((i for i, axis in enumerate(entry.axes) if axis in _BATCH), None)
            axis = sizes.sliced_axes.get(entry.name, batch)
            if axis is not None:
                self.axes[entry.name] = _checked_axis(entry, axis)
        if self.count > 1 and not self.axes:
            raise ArgumentError(
                "the option distributed.num_pipeline_micro_batches is above 1, and no described axis is called batch: "
                "say with distributed.sliced_axes along which axis each tensor is cut"
            )

    def cut(self, described: Sequence[Described], tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The tensors of each micro-batch. Raises ValueError for one that cannot be cut into as many."""
        found = [self._parts(entry, tensor) for entry, tensor in zip(described, tensors, strict=True)]
        return list(zip(*found, strict=True))

    def _parts(self, entry: Described, tensor: Tensor) -> Sequence[Tensor]:
        axis = self.axes.get(entry.name)
        if axis is None or self.count == 1:
            return [tensor] * self.count
        if tensor.shape[axis] % self.count:
            raise ArgumentError(
                f"the input {entry.name} has the shape {list(tensor.shape)}: axis {axis} cannot be cut into "
                f"{self.count} equal parts (distributed.num_pipeline_micro_batches)"
            )
        parts = tensor.chunk(self.count, axis)
        wanted = self._schema.get(entry.name)
        if wanted is not None and list(wanted) != list(parts[0].shape):
            raise ArgumentError(
                f"the option distributed.sliced_schema has {entry.name} as {list(wanted)}, and a micro-batch has "
                f"{list(parts[0].shape)}"
            )
        return parts

    def join(self, described: Sequence[Described], results: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """The results of all micro-batches as those of the batch; of the loss the mean."""
        joined = []
        for entry, some in zip(described, zip(*results, strict=True), strict=True):
            if entry.is_loss:
                joined.append(torch.stack([loss.detach() for loss in some]).mean(0))
            elif self.count == 1 or entry.name not in self.axes:
                joined.append(some[-1].detach())
            else:
                joined.append(torch.cat([part.detach() for part in some], self.axes[entry.name]))
        return tuple(joined)


def _checked_axis(entry: Described, axis: Any) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < len(entry.axes):
        raise ArgumentError(
            f"the option distributed.sliced_axes has axis {axis!r} of {entry.name}, described with {len(entry.axes)}"
        )
    return axis


class _Prediction(nn.Module):
    """The described results but the loss; its submodules have the names that they have in ``step``."""

    def __init__(self, step: StepModule) -> None:
        super().__init__()
        self.model = step.model
        self._predict = step.predict

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return self._predict(*inputs)


class _StageModule(nn.Module):
    """This process's stage as `PipelineStage` calls it: it finds the inputs of the micro-batch by itself."""

    def __init__(self, engine: Any, inputs: Sequence[int], last: bool, autocast: Autocast) -> None:
        super().__init__()
        self.engine, self._inputs, self._last, self._autocast = engine, inputs, last, autocast
        self.begin([])

    def begin(self, parts: Sequence[Sequence[Tensor]]) -> None:
        self._parts, self._next = parts, 0
        self.results: list[tuple[Tensor, ...]] = []  #: of the last stage, a tuple a micro-batch

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        part, self._next = self._parts[self._next], self._next + 1
        with self._autocast():
            found = self.engine(*received, *(part[i] for i in self._inputs))
        if self._last:
            self.results.append(found)
        return found


@dataclass
class _Variant:
    """The stages for one mode, and a schedule for each size of micro-batches."""

    cut: CutGraph
    stage: _StageModule
    schedules: dict[Any, tuple[Any, list[tuple[Tensor, ...]]]] = field(default_factory=dict)


class Pipeline:
    """This process's stage of a model, and what the others have of it.

    Args:
        step: the whole model with its loss; all processes have the same weights.
        description, options: of the trainer.
        config: settings of the engine.
        inputs: a batch; the stages are compared with the whole model on the first of its micro-batches.
        autocast: makes the context that forward runs in.

    Raises ValueError where options do not fit the model, or the stages compute something else.
    """

    def __init__(
        self, step: StepModule, description: ModelDescription, options: ORTTrainerOptions, processes: Processes,
        config: Config, inputs: Sequence[Tensor], autocast: Autocast,
    ) -> None:  # fmt: skip
        self._step, self._description, self._processes, self._config = step, description, processes, config
        self._slices = Slices([*description.inputs, *description.outputs], options)
        self._starts = _starts(step.model, options)
        self.starts = tuple([name.removeprefix("model.") for name in self._starts])
        self._stages, self._rank = processes.pipeline_size, processes.mesh.get_local_rank("pipeline")
        self._device, self._autocast = next(step.parameters()).device, autocast
        self._variants: dict[tuple[bool, bool], list[_Variant]] = {}
        self._loss_of: LossOf = _no_loss
        self._parts: Sequence[Sequence[Tensor]] = ()  # the inputs of the micro-batches, while they are on their way
        first = self._variant(True, True, self._slices.cut(description.inputs, inputs)[0], check=True)
        self.engine = first.stage.engine
        self.names = self._owned(first.cut)
        self.shared = self._groups_of_shared(first.cut)

    # --- steps ----------------------------------------------------------------------------------------------------

    def train(self, inputs: Sequence[Tensor], loss_of: LossOf) -> tuple[Tensor, ...]:
        """Forward and backward of all micro-batches; gradients are of the mean of their losses.

        ``loss_of``: what is differentiated, of the inputs and outputs of a micro-batch.
        """
        self._loss_of = lambda inputs, results: loss_of(inputs, results) / self._slices.count
        try:
            return self._run(inputs, True, True)
        finally:
            self._loss_of, self._parts = _no_loss, ()

    def evaluate(self, inputs: Sequence[Tensor], with_label: bool) -> tuple[Tensor, ...]:
        """The described outputs in eval mode; without the label those but the loss."""
        with torch.no_grad():
            return self._run(inputs, False, with_label)

    def _run(self, inputs: Sequence[Tensor], training: bool, with_label: bool) -> tuple[Tensor, ...]:
        self._parts = parts = self._slices.cut(self._description.inputs[: len(inputs)], inputs)
        variant = self._variant(training, with_label, parts[0])
        schedule, shapes = self._schedule(variant, parts[0], training, with_label)
        variant.stage.begin(parts)
        target = torch.arange(len(parts), device=self._device)
        schedule.step(target=target, return_outputs=False)
        outputs = [entry for entry in self._description.outputs if with_label or not entry.is_loss]
        results = variant.stage.results
        variant.stage.begin([])
        return self._to_all(outputs, results, shapes[-1])

    def _loss(self, results: Sequence[Tensor], part: Tensor) -> Tensor:
        """``part``: the number of the micro-batch."""
        return self._loss_of(self._parts[int(part)], results)

    def _to_all(
        self, described: Sequence[Described], results: Sequence[Sequence[Tensor]], shapes: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """What the last stage has found, in all processes of the pipeline."""
        last = self._rank == self._stages - 1
        if last:
            found = self._slices.join(described, results)
        else:
            blank = [torch.empty_like(shape, device=self._device) for shape in shapes]
            found = self._slices.join(described, [blank] * self._slices.count)
        group = self._processes.model_group
        source = distributed.get_global_rank(group, self._stages - 1)
        found = tuple([tensor.contiguous() for tensor in found])
        for tensor in found:
            distributed.broadcast(tensor, source, group)
        return found

    # --- stages ---------------------------------------------------------------------------------------------------

    def _variant(self, training: bool, with_label: bool, part: Sequence[Tensor], check: bool = False) -> _Variant:
        some = self._variants.setdefault((training, with_label), [])
        for variant in some:
            if variant.cut.fits(part):
                return variant
        module: nn.Module = self._step if with_label else _Prediction(self._step)
        modes = {each: each.training for each in module.modules()}
        module.train(training)
        try:
            described = self._description.inputs[: len(part)]
            dynamic = [[i for i, axis in enumerate(entry.axes) if isinstance(axis, str)] for entry in described]
            cut = CutGraph(module, part, dynamic, self._starts)
            if check:
                with self._autocast():
                    _compare(module, cut, part)
        finally:
            for each, mode in modes.items():
                each.training = mode
        stage = cut.stages[self._rank]
        engine: Any = ORTModule(stage.module, config=self._config)
        engine.train(training)
        some.append(_Variant(cut, _StageModule(engine, stage.inputs, self._rank == self._stages - 1, self._autocast)))
        return some[-1]

    def _schedule(
        self, variant: _Variant, part: Sequence[Tensor], training: bool, with_label: bool
    ) -> tuple[Any, list[tuple[Tensor, ...]]]:  # fmt: skip
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        key = tuple([(t.shape, t.dtype) for t in part])
        if key not in variant.schedules:
            with self._autocast():
                shapes = _shapes(variant.cut, part)
            if with_label:
                self._description.check(part, shapes[-1])  # in all processes, before any waits for another
            before = shapes[self._rank - 1] if self._rank else ()
            stage = PipelineStage(
                variant.stage, self._rank, self._stages, self._device, input_args=before,
                output_args=shapes[self._rank], group=self._processes.model_group,
            )  # fmt: skip
            count = self._slices.count
            kind = Schedule1F1B if training and count >= self._stages else ScheduleGPipe
            made = kind(stage, count, loss_fn=self._loss if training else None, scale_grads=False)
            variant.schedules[key] = made, shapes
        return variant.schedules[key]

    # --- weights --------------------------------------------------------------------------------------------------

    def _owned(self, cut: CutGraph) -> frozenset[str]:
        """Names in the model of the parameters and buffers of this stage; the first has those that no stage reads.

        Raises ValueError for a stage that trains none.
        """
        stages = [{id(t) for t in cut.tensors(k)} for k in range(self._stages)]
        for k in range(self._stages):
            if not any(p.requires_grad for p in cut.owners(k).values()):
                raise ArgumentError(f"stage {k} of the pipeline has no parameter to train: cut the model elsewhere")
        read = set().union(*stages)
        model = self._step.model
        named = (*model.named_parameters(), *model.named_buffers())
        return frozenset(
            name for name, t in named if id(t) in stages[self._rank] or (self._rank == 0 and id(t) not in read)
        )

    def _groups_of_shared(self, cut: CutGraph) -> list[tuple[str, int]]:
        """Parameters that several stages have, and the first of these: their gradients are added up."""
        stages: dict[int, list[int]] = {}
        for k in range(self._stages):
            for p in cut.owners(k).values():
                stages.setdefault(id(p), []).append(k)
        named = self._step.model.named_parameters()
        return [(name, stages[id(p)][0]) for name, p in named if len(stages.get(id(p), ())) > 1]

    def release_others(self) -> None:
        """Frees the weights of other stages: what reads them finds NaN."""
        for name, p in self._step.model.named_parameters():
            if name not in self.names:
                p.grad = None
                p.data = p.new_full((), float("nan") if p.is_floating_point() else 0).expand(p.shape)

    def add_shared(self) -> None:
        """The gradient of a parameter that several stages have becomes the sum of theirs."""
        named = dict(self._step.model.named_parameters())
        gradients = []
        for name, _ in self.shared:
            p = named[name]
            if name in self.names and p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                gradients.append(p.grad)
            elif p.requires_grad:
                gradients.append(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
        self._processes.add(gradients, self._processes.model_group)

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm of the gradients of all stages, each counted once."""
        twice = {name for name, first in self.shared if first != self._rank}
        mine = [g for name, g in gradients.items() if name not in twice]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if mine:
            square += nn.utils.get_total_norm(mine).double() ** 2
        distributed.all_reduce(square, group=self._processes.model_group)
        return square.sqrt()


def _no_loss(_: Sequence[Tensor], __: Sequence[Tensor]) -> Tensor:
    raise StateError("a pipeline has no loss to differentiate")


def _starts(model: nn.Module, options: ORTTrainerOptions) -> list[str]:
    count = options.distributed.pipeline_parallel_size
    given = [name.strip() for name in options.distributed.pipeline_cut_info_string.split(",") if name.strip()]
    if given and len(given) != count - 1:
        raise ArgumentError(
            f"the option distributed.pipeline_cut_info_string names {len(given)} modules, and "
            f"{count} stages (pipeline_parallel_size) need {count - 1}, separated by commas"
        )
    names = dict(model.named_modules())
    for name in given:
        if name not in names:
            raise ArgumentError(
                f"the option distributed.pipeline_cut_info_string names {name}, and the model has no such module"
            )
    return [f"model.{name}" for name in given or even_starts(model, count)]


def _shapes(cut: CutGraph, part: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """What each stage returns, as tensors without memory."""
    with fake_tensor_mode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        found = cut.run([mode.from_tensor(t) for t in part])
    return [tuple([_blank(t) for t in some]) for some in found]


def _blank(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _compare(module: nn.Module, cut: CutGraph, part: Sequence[Tensor]) -> None:
    """Raises ValueError unless the stages, one after the other, compute what the module does."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    known = dict(module.named_buffers())
    results = []
    for run in (lambda: module(*part), lambda: cut.run(part)[-1]):
        with torch.random.fork_rng(devices=[] if part[0].device.type == "cpu" else None), torch.no_grad():
            results.append([t.clone() for t in run()])
            for name, before in buffers.items():
                known[name].copy_(before)
    for ours, theirs in zip(*results, strict=True):
        if not torch.allclose(ours, theirs, 1e-4, 1e-5, equal_nan=True):
            raise ArgumentError(
                "the stages of the pipeline do not compute what the model does: cut it at other modules "
                "(distributed.pipeline_cut_info_string)"
            )
