"""Makes one module of a model and its loss, which takes and gives tensors in the order of a description."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import ArgumentError, ArgumentTypeError
from ortmodule.trainer.model_desc import ModelDescription


class StepModule(nn.Module):
    """``forward(*inputs)`` returns the described outputs as a tuple.

    ``loss_fn(output, label)``: computes the loss of what ``model`` returns; the label is the last described input,
    which ``model`` does not get. None: the model returns the loss.

    Raises ValueError, which names the input, where the description does not fit the model's forward.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, description: ModelDescription) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self._outputs = tuple(entry.name for entry in description.outputs)
        self._loss = description.loss
        names = [entry.name for entry in description.inputs]
        self._keywords = _keywords(model, names if loss_fn is None else names[:-1])

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        if self.loss_fn is None:
            return self._in_order(self._run(inputs))
        found = self._run(inputs[:-1])
        loss = self.loss_fn(found, inputs[-1])
        if len(self._outputs) == 1:
            return (loss,)
        rest = self._predictions(found)
        return (*rest[: self._loss], loss, *rest[self._loss :])

    def predict(self, *inputs: Any) -> tuple[Any, ...]:
        """The described outputs but the loss, without the label; needs ``loss_fn``."""
        return self._predictions(self._run(inputs))

    def _run(self, inputs: Sequence[Any]) -> Any:
        if self._keywords is None:
            return self.model(*inputs)
        return self.model(**dict(zip(self._keywords, inputs, strict=True)))

    def _predictions(self, found: Any) -> tuple[Any, ...]:
        names = [name for i, name in enumerate(self._outputs) if i != self._loss]
        return _pick(found, names, "beside the loss ")

    def _in_order(self, found: Any) -> tuple[Any, ...]:
        return _pick(found, list(self._outputs), "")


def _pick(found: Any, names: list[str], what: str) -> tuple[Any, ...]:
    """What a model returns, by name where it returns names; otherwise in its order."""
    if isinstance(found, Mapping):
        if all(name in found for name in names):
            return tuple([found[name] for name in names])
        found = tuple(found.values())
    values = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if len(values) != len(names):
        raise ArgumentError(f"{what}the outputs {', '.join(names)} are described, and the model returns {len(values)}")
    return values


def _keywords(model: nn.Module, names: list[str]) -> tuple[str, ...] | None:
    """The names to hand the inputs over with; None: in their order."""
    signature = inspect.signature(model.forward)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    known = [p.name for p in parameters]
    missing = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    if all(name in known for name in names):
        for name in missing:
            if name not in names:
                raise ArgumentError(f"the model's forward needs {name}, which is not among the described inputs")
        return tuple(names)
    for i, name in enumerate(names):
        if name in known and known.index(name) != i:
            other = next(n for n in names if n not in known)
            raise ArgumentError(
                f"the input {other} is described, and the model's forward has no parameter of this name"
            )
    if len(names) > len(known):
        raise ArgumentError(f"the input {names[len(known)]} is described, and the model's forward takes {len(known)}")
    if len(names) < len(missing):
        raise ArgumentError(f"the model's forward needs {missing[len(names)]}, which is not among the described inputs")
    return None


def loss_function(given: Any) -> Callable[..., Any] | None:
    """Raises TypeError unless ``given`` can be called, or is None."""
    if given is not None and not callable(given):
        raise ArgumentTypeError(f"loss_fn is called with the model's output and the label; {given!r} cannot be called")
    return given


def scalar(loss: Any, name: str) -> torch.Tensor:
    """Raises ValueError for a loss that is no scalar."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentError(f"the loss {name} is a scalar, not {shape}")
    return loss
