"""Runs the steps of an ORTTrainer: on a whole model, on cut layers, or on a stage of a pipeline."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ortmodule.core.config import Config
from ortmodule.core.errors import ArgumentError, StateError
from ortmodule.module import ORTModule
from ortmodule.optim.adasum import adasum_hook
from ortmodule.optim.config import LambConfig, OptimizerConfig
from ortmodule.optim.fused import FusedOptimizer
from ortmodule.trainer import whole_state
from ortmodule.trainer.layer_plan import LayerPlan
from ortmodule.trainer.model_desc import ModelDescription
from ortmodule.trainer.options import ORTTrainerOptions
from ortmodule.trainer.pipeline import Autocast, LossOf, Pipeline
from ortmodule.trainer.processes import Processes
from ortmodule.trainer.step_module import StepModule


class Runner(ABC):
    """Runs a model in the engine, and has its optimizer."""

    optimizer: Any = None
    rates: Sequence[float] = ()  #: learning rates of the optimizer's groups, as the configuration has them
    processes: Processes
    engine: Any = None  #: the ORTModule of what this process has
    plan: tuple[str, ...] = ()  #: names of the modules that are cut, or at which stages begin

    @abstractmethod
    def train(self, inputs: tuple[Any, ...], loss_of: LossOf, last: bool) -> tuple[Tensor, ...]:
        """Forward and backward; ``last``: of the steps whose gradients are added up. Returns the outputs."""

    @abstractmethod
    def evaluate(self, inputs: tuple[Any, ...], with_label: bool) -> tuple[Tensor, ...]:
        """The outputs in eval mode, without gradients; without the label those but the loss."""

    @abstractmethod
    def ready(self, inputs: tuple[Any, ...]) -> None:
        """Makes what needs a batch to be made."""

    @abstractmethod
    def join_gradients(self) -> None:
        """Before an update: gradients become those of all processes."""

    def clip(self, most: float) -> None:
        """Clips the norm of all gradients."""
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.clip_grad_norm(most)
        else:  # ZeRO's has states of a part of the parameters, and gradients of all
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, most)

    @abstractmethod
    def weights(self) -> dict[str, Any]:
        """Of the whole model, on rank 0."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """Of the whole model's optimizer, on rank 0."""

    @abstractmethod
    def load(self, weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Goes on from a whole model and its optimizer."""

    @abstractmethod
    def whole_model(self) -> nn.Module | None:
        """The model with all weights, on rank 0."""


class _OneCall(Runner):
    """The model and its loss are one call of the engine."""

    _module: Any  #: what is trained: the engine, or a DistributedDataParallel around it
    _step: StepModule
    _autocast: Autocast
    _late = False  #: gradients wait for the last step of an accumulation to be reduced

    def train(self, inputs: tuple[Any, ...], loss_of: LossOf, last: bool) -> tuple[Tensor, ...]:
        self._set_training(True)
        with self._module.no_sync() if self._late and not last else nullcontext():
            with self._autocast():
                outputs = self._module(*inputs)
            loss_of(inputs, outputs).backward()
        return outputs

    def evaluate(self, inputs: tuple[Any, ...], with_label: bool) -> tuple[Tensor, ...]:
        self._set_training(False)
        with torch.no_grad(), self._autocast():
            return self.engine(*inputs) if with_label else self._step.predict(*inputs)

    def _set_training(self, mode: bool) -> None:
        if self._step.model.training != mode or self.engine.training != mode:
            self._module.train(mode)


class WholeModel(_OneCall):
    """All of the model in this process; several processes have a DistributedDataParallel."""

    def __init__(
        self, step: StepModule, config: OptimizerConfig, options: ORTTrainerOptions, processes: Processes,
        autocast: Autocast,
    ) -> None:  # fmt: skip
        self.processes, self._step, self._autocast = processes, step, autocast
        self._late = processes.size > 1 and options.distributed.allreduce_post_accumulation
        self.engine = ORTModule(step, config=engine_config(options))
        self._module = _data_parallel(self.engine, options) if processes.size > 1 else self.engine
        self.optimizer = _optimizer(config, step.model, options)
        self.rates = _rates(self.optimizer)

    def ready(self, inputs: tuple[Any, ...]) -> None:
        """Nothing is missing."""

    def join_gradients(self) -> None:
        """DistributedDataParallel has."""

    def weights(self) -> dict[str, Any]:
        return self._step.model.state_dict()

    def optimizer_state(self) -> dict[str, Any]:
        if hasattr(self.optimizer, "consolidate_state_dict"):
            self.optimizer.consolidate_state_dict(to=0)
        return self.optimizer.state_dict() if self.processes.rank == 0 else {}

    def load(self, weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(optimizer)
        self._step.model.load_state_dict(weights)

    def whole_model(self) -> nn.Module | None:
        return self._step.model


class _Divided(Runner):
    """A part of the model in this process. It is made at the first batch."""

    def __init__(
        self, step: StepModule, config: OptimizerConfig, options: ORTTrainerOptions, processes: Processes,
        autocast: Autocast, description: ModelDescription,
    ) -> None:  # fmt: skip
        self.processes, self._step, self._model, self._autocast = processes, step, step.model, autocast
        self._config, self._options, self._description = config, options, description
        self._groups = config.groups(step.model)
        self._names = whole_state.WholeNames(step.model, self._groups)
        self._waiting: Mapping[str, Any] | None = None  # the state of the optimizer, until there is one
        self._skeleton: Any = None

    def ready(self, inputs: tuple[Any, ...]) -> None:
        if self.optimizer is not None:
            return
        if len(inputs) < len(self._description.inputs):
            raise StateError(
                "a model that processes have parts of is divided at its first batch: eval_step without the label needs "
                "a step with it before"
            )
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        self.processes.connect(device)
        self.processes.check_alike(inputs, [entry.name for entry in self._description.inputs])
        self.processes.start_alike(self._model)
        self._skeleton = whole_state.skeleton(self._model)
        self._divide(inputs)
        groups = self._names.part(self._groups, self._own())
        self.optimizer = self._config.optimizer(groups)  # type: ignore[call-arg]  # those of a configuration need no more
        self.rates, self._groups = _rates(self.optimizer), []
        if self._waiting is not None:
            whole_state.put_optimizer(self.optimizer, self._waiting, self._names, self._own())
            self._waiting = None

    @abstractmethod
    def _divide(self, inputs: tuple[Any, ...]) -> None:
        """Makes this process's part of the model."""

    @abstractmethod
    def _owned(self) -> frozenset[str] | None:
        """Names of the parameters that are here; None: a part of each."""

    def _own(self) -> dict[str, Any]:
        owned = self._owned()
        named = self._model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and (owned is None or name in owned)}

    def _local_gradients(self) -> dict[str, Any]:
        found = {name: p.grad for name, p in self._own().items() if p.grad is not None}
        return {name: g.to_local() if hasattr(g, "to_local") else g for name, g in found.items()}

    def join_gradients(self) -> None:
        self.processes.average(self._local_gradients().values())

    def weights(self) -> dict[str, Any]:
        self._check_made("a checkpoint")
        return whole_state.gathered_weights(self._model, self._owned())

    def optimizer_state(self) -> dict[str, Any]:
        return whole_state.gathered_optimizer(self.optimizer, self._names, self._own(), self._owned() is not None)

    def load(self, weights: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        if self.optimizer is None:
            self._model.load_state_dict(weights)
            self._waiting = copy.copy(optimizer)
            return
        whole_state.put_optimizer(self.optimizer, optimizer, self._names, self._own())
        whole_state.put_weights(self._model, weights, self._owned())

    def whole_model(self) -> nn.Module | None:
        self._check_made("save_as_onnx")
        weights = self.weights()
        if self.processes.rank:
            return None
        model = copy.deepcopy(self._skeleton)
        model.load_state_dict(weights, assign=True)
        return model

    def _check_made(self, what: str) -> None:
        if self.optimizer is None:
            raise StateError(f"{what} of a model that processes have parts of needs a train_step before")


class CutLayers(_OneCall, _Divided):
    """A part of each layer's features in this process (distributed.horizontal_parallel_size)."""

    def __init__(self, step: StepModule, config: OptimizerConfig, *rest: Any) -> None:
        if isinstance(config, LambConfig):
            raise ArgumentError("LAMB needs whole weights, and distributed.horizontal_parallel_size is above 1")
        super().__init__(step, config, *rest)

    def _divide(self, inputs: tuple[Any, ...]) -> None:
        given = self._options.distributed.horizontal_parallel_plan
        self.plan = LayerPlan(self._model, lambda: self._step(*inputs), self.processes, given).names
        self.engine = self._module = ORTModule(self._step, config=engine_config(self._options))

    def _owned(self) -> frozenset[str] | None:
        return None


class PipelineStages(_Divided):
    """One stage of the model in this process (distributed.pipeline_parallel_size)."""

    pipeline: Pipeline

    def _divide(self, inputs: tuple[Any, ...]) -> None:
        self.pipeline = Pipeline(
            self._step, self._description, self._options, self.processes, engine_config(self._options), inputs,
            self._autocast,
        )  # fmt: skip
        self.engine, self.plan = self.pipeline.engine, self.pipeline.starts
        self.pipeline.release_others()

    def _owned(self) -> frozenset[str] | None:
        return self.pipeline.names

    def train(self, inputs: tuple[Any, ...], loss_of: LossOf, last: bool) -> tuple[Tensor, ...]:
        return self.pipeline.train(inputs, loss_of)

    def evaluate(self, inputs: tuple[Any, ...], with_label: bool) -> tuple[Tensor, ...]:
        return self.pipeline.evaluate(inputs, with_label)

    def join_gradients(self) -> None:
        self.pipeline.add_shared()
        super().join_gradients()

    def clip(self, most: float) -> None:
        norm = self.pipeline.norm(self._local_gradients())
        factor = float(most / (norm + 1e-6))
        if not factor >= 1.0:  # NaN as well
            self.optimizer.scale_gradients(factor)


def engine_config(options: ORTTrainerOptions) -> Config:
    """What is recomputed, and the limit of memory, are settings of the engine."""
    settings: dict[str, Any] = {}
    switches = options.graph_transformer
    if switches.attn_dropout_recompute or switches.gelu_recompute:
        settings["memory_opt_level"] = 2
    elif switches.transformer_layer_recompute:
        settings |= {"memory_opt_level": 1, "memory_opt_layers": switches.number_recompute_layers}
    if options.device.mem_limit:
        settings["memory_budget"] = options.device.mem_limit
    return Config(**settings)


def _rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _data_parallel(module: Any, options: ORTTrainerOptions) -> Any:
    parallel = DistributedDataParallel(module)
    if options.distributed.enable_adasum:
        parallel.register_comm_hook(None, adasum_hook)
    return parallel


def _optimizer(config: OptimizerConfig, model: nn.Module, options: ORTTrainerOptions) -> Any:
    groups = config.groups(model)
    if options.distributed.deepspeed_zero_optimization.stage == 0 or options.distributed.world_size == 1:
        return config.optimizer(groups)  # type: ignore[call-arg]  # those of a configuration need no more
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it has a process group at hand by now

    return ZeroRedundancyOptimizer(groups, optimizer_class=config.optimizer)
