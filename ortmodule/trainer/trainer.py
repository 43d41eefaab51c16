"""Runs forward, backward and the optimizer's step in one call: `ORTTrainer` of the first training API."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, distributed, nn

from ortmodule.core import devices
from ortmodule.core.errors import ArgumentError, ArgumentTypeError, StateError
from ortmodule.core.logger import warn_once
from ortmodule.module import ORTModule
from ortmodule.optim.config import OptimizerConfig
from ortmodule.optim.loss_scaler import DynamicLossScaler, StaticLossScaler
from ortmodule.trainer import checkpoint, onnx_file
from ortmodule.trainer.early_updates import EarlyUpdates
from ortmodule.trainer.model_desc import ModelDescription
from ortmodule.trainer.options import ORTTrainerOptions
from ortmodule.trainer.processes import Processes
from ortmodule.trainer.runners import CutLayers, PipelineStages, Runner, WholeModel
from ortmodule.trainer.step_module import StepModule, loss_function, scalar


@dataclass
class TrainStepInfo:
    """Where a training stands; schedulers of learning rates get it."""

    optimizer_config: OptimizerConfig
    all_finite: bool = True  #: the gradients of the latest update; if not, it was left out
    optimization_step: int = 0  #: updates so far
    step: int = 0  #: calls of `train_step` so far


class ORTTrainer:
    """Trains ``model`` with one call a step: ``loss = trainer.train_step(*inputs)``.

    ::

        description = {"inputs": [("x", ["batch", 784]), ("label", ["batch"])],
                       "outputs": [("loss", [], True), ("logits", ["batch", 10])]}
        trainer = ORTTrainer(model, description, optim.AdamConfig(lr=1e-3), nn.CrossEntropyLoss())
        loss, logits = trainer.train_step(x, label)

    Args:
        model: a module; it stays the script's, and is trained in place.
        model_desc: the described inputs and outputs, in their order. Axes are numbers, or symbols, which are one size
            in a step. The label, if there is a ``loss_fn``, is the last input.
        optim_config: an AdamConfig, LambConfig or SGDConfig of :mod:`ortmodule.optim`.
        loss_fn: ``loss_fn(output, label)``; None: the model returns the loss.
        options: an :class:`ORTTrainerOptions`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the description does not fit the model, or options do not fit the processes.
        RuntimeError: several processes are asked for, and there is no process group.
    """

    def __init__(
        self, model: nn.Module, model_desc: Mapping[str, Any], optim_config: OptimizerConfig,
        loss_fn: Callable[..., Any] | None = None, options: ORTTrainerOptions | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module) or isinstance(model, ORTModule):
            raise ArgumentTypeError(f"model is a torch.nn.Module that is not wrapped yet, not {type(model).__name__}")
        if not isinstance(optim_config, OptimizerConfig):
            raise ArgumentTypeError(f"optim_config is an AdamConfig, LambConfig or SGDConfig, not {optim_config!r}")
        if options is not None and not isinstance(options, ORTTrainerOptions):
            raise ArgumentTypeError(f"options is an ORTTrainerOptions, not {type(options).__name__}")
        self.options = ORTTrainerOptions() if options is None else options
        self.model, self.optim_config, self.loss_fn = model, optim_config, loss_function(loss_fn)
        self.model_desc = ModelDescription(model_desc)
        self._processes = Processes(self.options)
        _seed(self.options.seed)
        if self.options.device.id is not None:
            model.to(self.options.device.id)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        _freeze(model, self.options.utils.frozen_weights)
        self._step_module = StepModule(model, self.loss_fn, self.model_desc)
        self._dtype, self._scaler = _precision(self.options, self._device)
        self._runner = self._runner_of(optim_config)
        if self._processes.divide_the_model and self._scaler is not None:
            self._scaler.agree = self._processes.agree
        self._info = TrainStepInfo(optim_config)
        self._samples: tuple[Tensor, ...] | None = None
        self._early = self._early_updates()

    def _runner_of(self, optim_config: OptimizerConfig) -> Runner:
        sizes, common = self.options.distributed, (self.options, self._processes, self._autocast)
        if sizes.horizontal_parallel_size > 1:
            return CutLayers(self._step_module, optim_config, *common, self.model_desc)
        if sizes.pipeline_parallel_size > 1:
            return PipelineStages(self._step_module, optim_config, *common, self.model_desc)
        return WholeModel(self._step_module, optim_config, *common)

    @property
    def optimizer(self) -> Any:
        """Of this process's weights; None before the first step, where processes have parts of the model."""
        return self._runner.optimizer

    @property
    def engine(self) -> Any:
        """The ORTModule that runs here, for `explain`; None before the first step, where processes have parts."""
        return self._runner.engine

    @property
    def parallel_plan(self) -> tuple[str, ...]:
        """Names of the modules that are cut among processes, or at which stages of a pipeline begin."""
        return self._runner.plan

    @property
    def data_parallel_size(self) -> int:
        """How many processes, or groups of processes that have one model together, are given other batches."""
        return self._processes.data_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of these this process is: ``DistributedSampler(data, data_parallel_size, data_parallel_rank)``."""
        return self._processes.data_rank

    @property
    def train_step_info(self) -> TrainStepInfo:
        """Steps so far, and whether the latest gradients were finite."""
        return self._info

    @property
    def loss_scaler(self) -> StaticLossScaler | None:
        return self._scaler

    # --- steps ----------------------------------------------------------------------------------------------------

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward, backward, and at every ``gradient_accumulation_steps``-th call an update of the weights.

        The inputs are given in the order of the description, or by their names. Returns the described outputs in a
        tuple, or the loss if there is no other.

        Raises TypeError for other inputs, ValueError for a tensor that is not as described.
        """
        inputs = self._inputs(args, kwargs)
        self._runner.ready(inputs)
        if self._early is not None:
            self._set_rates(replace(self._info, step=self._info.step + 1))
        last = (self._info.step + 1) % self._accumulation == 0
        outputs = self._runner.train(inputs, self._loss_of, last)
        self._info.step += 1
        if last:
            self._update()
        outputs = tuple([output.detach() for output in outputs])
        return outputs[0] if len(outputs) == 1 else outputs

    def _loss_of(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """What is differentiated."""
        self.model_desc.check(inputs, outputs)
        loss = scalar(outputs[self.model_desc.loss], self.model_desc.outputs[self.model_desc.loss].name)
        part = loss if self._accumulation == 1 else loss / self._accumulation
        return part if self._scaler is None else self._scaler.scale(part)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """The described outputs in eval mode, without gradients. Where the label is left out, those without the loss.

        Raises as :meth:`train_step`.
        """
        without_label = self.loss_fn is not None and len(args) + len(kwargs) == len(self.model_desc.inputs) - 1
        inputs = self._inputs(args, kwargs, without_label)
        self._runner.ready(inputs)
        outputs = self._runner.evaluate(inputs, not without_label)
        if not without_label:
            self.model_desc.check(inputs, outputs)
        return _alone(outputs)

    @property
    def _accumulation(self) -> int:
        return self.options.batch.gradient_accumulation_steps

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], without_label: bool = False) -> tuple[Any, ...]:
        described = self.model_desc.inputs[: -1 if without_label else None]
        names = [entry.name for entry in described]
        for name in kwargs:
            if name not in names:
                raise ArgumentTypeError(f"there is no input {name}; described are {', '.join(names)}")
            if name in names[: len(args)]:
                raise ArgumentTypeError(f"the input {name} is given twice")
        missing = [name for name in names[len(args) :] if name not in kwargs]
        if missing or len(args) > len(names):
            what = f"the input {missing[0]} is missing" if missing else f"{len(args)} inputs are given"
            raise ArgumentTypeError(f"{what}; described are {', '.join(names)}")
        inputs = (*args, *(kwargs[name] for name in names[len(args) :]))
        inputs = tuple([t.to(self._device) if isinstance(t, Tensor) else t for t in inputs])
        self.model_desc.check(inputs, ())
        if not without_label:
            self._samples = inputs
        return inputs

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def _early_updates(self) -> EarlyUpdates | None:
        """While backward goes on, if the option asks for it and nothing needs all gradients together."""
        if not self.options.utils.memory_efficient_gradient:
            return None
        clips = self.optim_config.max_norm_clip is not None and self.options.utils.grad_norm_clip
        reasons = {
            "the norm of all gradients is clipped (utils.grad_norm_clip, max_norm_clip)": clips,
            "a loss scaler looks at all gradients": self._scaler is not None,
            "gradients of several steps are added up": self._accumulation > 1,
            "gradients of several processes are added up": self._processes.size > 1,
        }
        for reason, holds in reasons.items():
            if holds:
                warn_once(f"ORTTrainer: the option utils.memory_efficient_gradient has no effect: {reason}")
                return None
        return EarlyUpdates(self.optimizer)

    def _update(self) -> None:
        scaler, clip = self._scaler, self.optim_config.max_norm_clip
        if self._early is not None:
            self._early.step()
            self._info.optimization_step += 1
            return
        self._set_rates(self._info)
        self._runner.join_gradients()
        finite = True
        if clip is not None and self.options.utils.grad_norm_clip:
            if scaler is not None:
                finite = scaler.unscale_(self.optimizer)
            if finite:
                self._runner.clip(clip)
        if scaler is not None:
            finite = scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._info.all_finite = finite
        self._info.optimization_step += 1

    def _set_rates(self, info: TrainStepInfo) -> None:
        scheduler = self.options.lr_scheduler
        if scheduler is None:
            return
        step = getattr(scheduler, "_step", scheduler.get_lr)  # keeps it for get_last_lr
        rate = step(info)[0]
        factor = rate / self.optim_config.lr if self.optim_config.lr else 0.0
        for group, base in zip(self.optimizer.param_groups, self._runner.rates, strict=True):
            group["lr"] = rate if base == self.optim_config.lr else base * factor

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a training goes on from, on rank 0; with ZeRO all ranks call it. Tensors are not copied.

        Raises RuntimeError between the steps of an accumulation whose gradients several processes have not reduced.
        """
        accumulated, world = self._info.step % self._accumulation, self._processes.size
        if accumulated and world > 1:
            raise StateError(
                f"a checkpoint of {world} processes is made after an update, not after {accumulated} of "
                f"{self._accumulation} accumulated steps"
            )
        mine = [devices.generators()]
        if world > 1:
            mine = [None] * world  # type: ignore[list-item]  # all_gather_object fills it
            distributed.all_gather_object(mine, devices.generators())
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None} if accumulated else {}
        return {
            "model": self._runner.weights(),
            "optimizer": self._runner.optimizer_state(),
            "gradients": gradients,
            "loss_scaler": None if self._scaler is None else self._scaler.state_dict(),
            "steps": {"optimization_step": self._info.optimization_step, "step": self._info.step},
            "generators": mine,
        }

    def load_state_dict(self, state: Mapping[str, Any], path: str | os.PathLike[str] = "state") -> None:
        """Goes on from what :meth:`state_dict` returned. ``path``: what an exception calls it.

        Raises ValueError, with nothing changed, for the state of another model, optimizer or loss scaler.
        """
        checkpoint.check_weights(path, state["model"], self.model.state_dict())
        if (state["loss_scaler"] is None) != (self._scaler is None):
            has = "no loss scaler" if state["loss_scaler"] is None else "a loss scaler"
            raise ArgumentError(f"the checkpoint {path} is of a training with {has}, this one is not")
        self._runner.load(state["model"], state["optimizer"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["loss_scaler"])
        vars(self._info).update(state["steps"])
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        for name, p in self.model.named_parameters():
            if name in state["gradients"]:
                p.grad = state["gradients"][name].to(p.device)
        if len(state["generators"]) == self._processes.size:  # of as many processes: each goes on with its own
            devices.set_generators(state["generators"][self.options.distributed.world_rank])

    def save_checkpoint(self, path: str | os.PathLike[str], user_dict: Mapping[str, Any] | None = None) -> None:
        """Writes all that the training goes on from into one file; ``user_dict``: what the script adds.

        It is complete, on the disk, before it takes the place of what is there: a process that is killed, or a full
        disk, leaves that as it was. On several processes all call it, and rank 0 writes.

        Raises OSError for a place that cannot be written, TypeError for a ``user_dict`` of other things than tensors,
        numbers, texts and containers of them, and RuntimeError as :meth:`state_dict`.
        """
        user = dict(user_dict or {})
        checkpoint.check_user(user)
        state = {**self.state_dict(), "user": user}
        if self.options.distributed.world_rank == 0:
            checkpoint.write(path, state)
        if self._processes.size > 1:
            distributed.barrier()

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Goes on from a checkpoint, with the same bits; returns its ``user_dict``. All processes read the file.

        Raises FileNotFoundError; ValueError, with nothing changed, for a file that is no checkpoint, is cut short, or
        is of another model.
        """
        state = checkpoint.read(path)
        self.load_state_dict(state, path)
        return state["user"]

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the model for inference, with the described names and axes; without the loss, if a ``loss_fn`` has it.

        Raises RuntimeError before the first step (the description has no types), or for what PyTorch cannot export.
        """
        if self._samples is None:
            raise StateError("save_as_onnx needs a train_step or eval_step before, for the types of the inputs")
        inputs, outputs = self.model_desc.inputs, self.model_desc.outputs
        if self.loss_fn is not None:
            inputs = inputs[:-1]
            outputs = [entry for entry in outputs if not entry.is_loss]
            if not outputs:
                raise ArgumentError(
                    "the model description has no output but the loss: there is nothing to save as ONNX"
                )
        model = self._runner.whole_model()
        try:
            if model is not None:
                step = StepModule(model, self.loss_fn, self.model_desc)
                function = step.forward if self.loss_fn is None else step.predict
                onnx_file.save(path, model, function, self._samples[: len(inputs)], inputs, outputs)
        finally:
            if self._processes.divide_the_model:
                distributed.barrier()


def _alone(outputs: tuple[Any, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


# --- what the options say ---------------------------------------------------------------------------------------------


def _seed(seed: int | None) -> None:
    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _freeze(model: nn.Module, names: Sequence[str]) -> None:
    known = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name not in known:
            raise ArgumentError(f"the option utils.frozen_weights names {name}, and the model has no such parameter")
        known[name].requires_grad_(False)


def _precision(
    options: ORTTrainerOptions, device: torch.device
) -> tuple[torch.dtype | None, StaticLossScaler | None]:  # fmt: skip
    """The type of autocast and the loss scaler; without mixed precision none."""
    chosen = options.mixed_precision
    if not chosen.enabled:
        return None, None
    dtype = getattr(torch, chosen.dtype or ("bfloat16" if device.type == "cpu" else "float16"))
    scaler = chosen.loss_scaler
    return dtype, DynamicLossScaler() if scaler is None and dtype is torch.float16 else scaler
