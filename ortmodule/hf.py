"""Provides Optimum's trainers: those of transformers, whose model the engine runs.

    trainer = ORTTrainer(model=model, args=ORTTrainingArguments("out", optim="adamw_ort_fused"), train_dataset=...)
    trainer.train()

The model is wrapped, and the rest is transformers': loop, checkpoints, evaluation. What it saves is a plain model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ortmodule.core.errors import ArgumentError, MissingPackageError
from ortmodule.core.objects.dispatchers import dispatcher_of

try:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise MissingPackageError(
        f"ortmodule.hf needs transformers and accelerate: {error}", name="transformers"
    ) from error

from ortmodule.core.config import DebugOptions
from ortmodule.core.logger import LogLevel
from ortmodule.module import ORTModule
from ortmodule.optim.fused_adam import FusedAdam

__all__ = ["ORTSeq2SeqTrainer", "ORTSeq2SeqTrainingArguments", "ORTTrainer", "ORTTrainingArguments"]

FUSED = "adamw_ort_fused"


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class _Settings:
    """What Optimum's arguments have beside transformers'."""

    # Not transformers' own type, which is a list of the names that it knows.
    optim: str = _setting(TrainingArguments.default_optim, f"The optimizer: a name of transformers', or {FUSED}.")
    use_module_with_loss: bool = _setting(
        False, "Compute label smoothing, or a `compute_loss_func`, in the captured graph, too."
    )
    save_onnx: bool = _setting(False, "Save the graphs as ONNX files.")
    onnx_prefix: str | None = _setting(None, "What the names of these files begin with; the model's name if not given.")
    onnx_log_level: str = _setting("WARNING", f"How much is reported: {', '.join(level.name for level in LogLevel)}.")

    def __post_init__(self) -> None:
        if self.onnx_log_level.upper() not in LogLevel.__members__:
            names = ", ".join(LogLevel.__members__)
            raise ArgumentError(f"onnx_log_level={self.onnx_log_level}: it is one of {names}")
        # transformers knows no other names than its own.
        fused = self.optim == FUSED
        if fused:
            self.optim = "adamw_torch"
        super().__post_init__()  # type: ignore[misc]  # of transformers' arguments
        if fused:
            self.optim = FUSED


@dataclass
class ORTTrainingArguments(_Settings, TrainingArguments):
    """`transformers.TrainingArguments` with ``optim="adamw_ort_fused"`` (:class:`ortmodule.optim.FusedAdam`), and the
    settings of Optimum. Raises ValueError for a value that there is not."""


@dataclass
class ORTSeq2SeqTrainingArguments(_Settings, Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` with the same additions."""


class _InEngine:
    """What makes a trainer one whose model the engine runs."""

    args: Any
    label_smoother: Any
    compute_loss_func: Any
    model: Any

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **given: Any) -> None:
        if "tokenizer" in given:  # as it was called before
            given["processing_class"] = given.pop("tokenizer")
        given.pop("feature", None)  # of Optimum's first versions
        self._given_args = args
        super().__init__(self._wrapped(model), args, *rest, **given)  # type: ignore[call-arg]  # transformers' trainer
        self._loss_inside = bool(getattr(self.args, "use_module_with_loss", False)) and (
            self.label_smoother is not None or self.compute_loss_func is not None
        )
        if self._loss_inside:
            self._compute_loss_inside()

    def call_model_init(self, trial: Any = None) -> Any:
        model = self._wrapped(super().call_model_init(trial))  # type: ignore[misc]  # a method of transformers' trainer
        if getattr(self, "_loss_inside", False):
            self.model = model
            self._compute_loss_inside()
        return model

    def _wrapped(self, model: Any) -> Any:
        if not isinstance(model, nn.Module) or isinstance(model, ORTModule):
            return model
        args = self._given_args
        save = bool(getattr(args, "save_onnx", False))
        name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "").rstrip("/").rpartition("/")[2]
        prefix = getattr(args, "onnx_prefix", None) or name or type(model).__name__
        level = LogLevel[getattr(args, "onnx_log_level", "WARNING").upper()]
        return ORTModule(model, DebugOptions(log_level=level, save_onnx=save, onnx_prefix=prefix if save else ""))

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        if args.optim != FUSED:
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        betas = args.adam_beta1, args.adam_beta2
        return FusedAdam, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}

    # --- the loss in the graph ----------------------------------------------------------------------------------------

    def _compute_loss_inside(self) -> None:
        """The model's forward computes the loss, too, as the trainer would from its results."""
        self.model.forward = _with_loss(self.model, self.label_smoother, self.compute_loss_func)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **given: Any) -> Any:
        if not self._loss_inside:
            return super().compute_loss(model, inputs, *rest, **given)  # type: ignore[misc]  # transformers'
        found = self.label_smoother, self.compute_loss_func
        self.label_smoother = self.compute_loss_func = None  # the model's result has the loss
        try:
            return super().compute_loss(model, inputs, *rest, **given)  # type: ignore[misc]  # transformers'
        finally:
            self.label_smoother, self.compute_loss_func = found


def _with_loss(model: Any, smoother: Any, function: Any) -> Callable:
    module = dispatcher_of(model).module
    original, signature = module.forward, inspect.signature(module.forward)
    names = signature.parameters
    takes_number = "num_items_in_batch" in names or any(p.kind is p.VAR_KEYWORD for p in names.values())
    shifted = {"shift_labels": True} if type(module).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs = signature.bind_partial(*args).arguments | kwargs
        labels, number = kwargs.pop("labels", None), kwargs.get("num_items_in_batch")
        if not takes_number:
            kwargs.pop("num_items_in_batch", None)
        outputs = original(**kwargs)
        if labels is not None:
            call = function if function is not None else smoother
            more = {} if function is not None else shifted
            outputs["loss"] = call(outputs, labels, num_items_in_batch=number, **more)
        return outputs

    forward.__signature__ = signature  # type: ignore[attr-defined]  # Trainer chooses columns of data by it
    return forward


class ORTTrainer(_InEngine, Trainer):
    """`transformers.Trainer`, whose model the engine runs: takes the same arguments."""


class ORTSeq2SeqTrainer(_InEngine, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, whose model the engine runs: takes the same arguments."""
