"""Runs forward, backward and the optimizer's step in one call: `ORTTrainer` of the first training API."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ortmodule.core import devices
from ortmodule.core.config import Config
from ortmodule.core.errors import ArgumentError, ArgumentTypeError, StateError
from ortmodule.module import ORTModule
from ortmodule.optim.adasum import adasum_hook
from ortmodule.optim.config import OptimizerConfig
from ortmodule.optim.fused import FusedOptimizer
from ortmodule.optim.loss_scaler import DynamicLossScaler, StaticLossScaler
from ortmodule.trainer import checkpoint, onnx_file
from ortmodule.trainer.model_desc import ModelDescription
from ortmodule.trainer.options import ORTTrainerOptions
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
        self._world = _world(self.options)
        _seed(self.options.seed)
        if self.options.device.id is not None:
            model.to(self.options.device.id)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        _freeze(model, self.options.utils.frozen_weights)
        self._step_module = StepModule(model, self.loss_fn, self.model_desc)
        self._engine: Any = ORTModule(self._step_module, config=_config(self.options))
        self._module: Any = _data_parallel(self._engine, self.options) if self._world > 1 else self._engine
        self.optimizer = _optimizer(optim_config, model, self.options)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._dtype, self._scaler = _precision(self.options, self._device)
        self._info = TrainStepInfo(optim_config)
        self._samples: tuple[Tensor, ...] | None = None

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
        self._set_training(True)
        last = (self._info.step + 1) % self._accumulation == 0
        with self._collecting(last):
            with self._autocast():
                outputs = self._module(*inputs)
            self.model_desc.check(inputs, outputs)
            loss = scalar(outputs[self.model_desc.loss], self.model_desc.outputs[self.model_desc.loss].name)
            part = loss if self._accumulation == 1 else loss / self._accumulation
            (part if self._scaler is None else self._scaler.scale(part)).backward()
        self._info.step += 1
        if last:
            self._update()
        outputs = tuple([output.detach() for output in outputs])
        return outputs[0] if len(outputs) == 1 else outputs

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """The described outputs in eval mode, without gradients. Where the label is left out, those without the loss.

        Raises as :meth:`train_step`.
        """
        without_label = self.loss_fn is not None and len(args) + len(kwargs) == len(self.model_desc.inputs) - 1
        inputs = self._inputs(args, kwargs, without_label)
        self._set_training(False)
        with torch.no_grad(), self._autocast():
            if without_label:
                return _alone(self._step_module.predict(*inputs))
            outputs = self._engine(*inputs)
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

    def _set_training(self, mode: bool) -> None:
        if self.model.training != mode or self._engine.training != mode:
            self._module.train(mode)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def _collecting(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients of all steps but the last are added up in each process, where it is asked for."""
        wait = self._world > 1 and not last and self.options.distributed.allreduce_post_accumulation
        return self._module.no_sync() if wait else nullcontext()

    def _update(self) -> None:
        scaler, clip = self._scaler, self.optim_config.max_norm_clip
        if self.options.lr_scheduler is not None:
            self._set_rates()
        finite = True
        if clip is not None and self.options.utils.grad_norm_clip:
            if scaler is not None:
                finite = scaler.unscale_(self.optimizer)
            if finite:
                self._clip(clip)
        if scaler is not None:
            finite = scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._info.all_finite = finite
        self._info.optimization_step += 1

    def _clip(self, most: float) -> None:
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.clip_grad_norm(most)
        else:  # ZeRO's has states of a part of the parameters, and gradients of all
            nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def _set_rates(self) -> None:
        scheduler = self.options.lr_scheduler
        step = getattr(scheduler, "_step", scheduler.get_lr)  # keeps it for get_last_lr
        rate = step(self._info)[0]
        factor = rate / self.optim_config.lr if self.optim_config.lr else 0.0
        for group, base in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate if base == self.optim_config.lr else base * factor

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a training goes on from, on rank 0; with ZeRO all ranks call it. Tensors are not copied.

        Raises RuntimeError between the steps of an accumulation whose gradients several processes have not reduced.
        """
        accumulated = self._info.step % self._accumulation
        if accumulated and self._world > 1:
            raise StateError(
                f"a checkpoint of {self._world} processes is made after an update, not after {accumulated} of "
                f"{self._accumulation} accumulated steps"
            )
        if hasattr(self.optimizer, "consolidate_state_dict"):
            self.optimizer.consolidate_state_dict(to=0)
        mine = [devices.generators()]
        if self._world > 1:
            mine = [None] * self._world  # type: ignore[list-item]  # all_gather_object fills it
            distributed.all_gather_object(mine, devices.generators())
        rank = self.options.distributed.world_rank
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None} if accumulated else {}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict() if rank == 0 else {},
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(state["model"])
        if self._scaler is not None:
            self._scaler.load_state_dict(state["loss_scaler"])
        vars(self._info).update(state["steps"])
        self.optimizer.zero_grad()
        for name, p in self.model.named_parameters():
            if name in state["gradients"]:
                p.grad = state["gradients"][name].to(p.device)
        if len(state["generators"]) == self._world:  # of as many processes: each goes on with its own
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
        if self._world > 1:
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
        if self.loss_fn is None:
            function: Any = self._step_module.forward
        else:
            function, inputs = self._step_module.predict, inputs[:-1]
            outputs = [entry for entry in outputs if not entry.is_loss]
            if not outputs:
                raise ArgumentError(
                    "the model description has no output but the loss: there is nothing to save as ONNX"
                )
        onnx_file.save(path, self.model, function, self._samples[: len(inputs)], inputs, outputs)


def _alone(outputs: tuple[Any, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


# --- what the options say ---------------------------------------------------------------------------------------------


def _world(options: ORTTrainerOptions) -> int:
    """How many processes train together."""
    size, rank = options.distributed.world_size, options.distributed.world_rank
    if size == 1:
        return 1
    if not (distributed.is_available() and distributed.is_initialized()):
        raise StateError(
            f"the option distributed.world_size is {size}: call torch.distributed.init_process_group before"
        )
    found = distributed.get_world_size(), distributed.get_rank()
    if (size, rank) != found:
        raise ArgumentError(
            f"the options distributed.world_size and world_rank are {size} and {rank}, "
            f"the process group has {found[0]} and {found[1]}"
        )
    return size


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


def _config(options: ORTTrainerOptions) -> Config:
    """What is recomputed, and the limit of memory, are settings of the engine."""
    settings: dict[str, Any] = {}
    switches = options.graph_transformer
    if switches.attn_dropout_recompute or switches.gelu_recompute:
        settings["memory_opt_level"] = 2
    elif switches.transformer_layer_recompute:
        settings["memory_opt_level"] = 1
    if options.device.mem_limit:
        settings["memory_budget"] = options.device.mem_limit
    return Config(**settings)


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
