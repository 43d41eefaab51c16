"""Gives graphs this rank's parts of DTensor parameters, and makes DTensors of their gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ortmodule.core.torch_private import local_part, untraced


class Made(NamedTuple):
    """A part that was handed out, and what it was made of."""

    whole: Any
    local: torch.Tensor
    part: torch.Tensor


class LocalParameters:
    """The DTensors among a module's parameters as a :class:`~ortmodule.guards.inventory.Holder` of this rank's parts.

    A part has the parameter's memory. It is the same tensor as long as the parameter is the same; autograd is given
    others (:func:`attached`).
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters
        self.gradients: dict[str, tuple] = {}  # placements, as a trace has found them
        self._made: dict[str, Made] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        whole, made = self.parameters[key], self._made.get(key)
        if (
            made is None
            or made.whole is not whole
            or made.local is not local_part(whole)
            or made.part.requires_grad is not whole.requires_grad
        ):
            with untraced(), torch.inference_mode(False):
                part = local_part(whole).detach().requires_grad_(whole.requires_grad)
            made = self._made[key] = Made(whole, local_part(whole), part)
        return made.part

    def __setitem__(self, key: str, part: torch.Tensor) -> None:
        raise TypeError(f"{key} is a DTensor, of which a graph has a part")

    def __contains__(self, key: str) -> bool:
        return self.parameters.get(key) is not None

    def pop(self, key: str) -> torch.Tensor:
        raise TypeError(f"{key} is a DTensor, of which a graph has a part")

    def whole(self, key: str) -> Any:
        return self.parameters[key]

    def layout(self, key: str) -> tuple:
        """What graphs depend on: the mesh, and how the parameter lies on it."""
        whole = self.parameters[key]
        return whole.device_mesh, tuple(whole.placements)

    def settle(self, key: str, placements: tuple) -> bool:
        """Its gradients lie on the mesh like this. False: those of another graph do not."""
        return self.gradients.setdefault(key, placements) == placements

    def like(self, key: str, part: torch.Tensor) -> Any:
        """A DTensor like the parameter, of which this rank has ``part``, whose gradients are those of the graph."""
        whole = self.parameters[key]
        return _dtensor().from_local(
            part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride(),
            grad_placements=self.gradients[key],
        )  # fmt: skip


def of_part(change: Callable[[torch.Tensor], torch.Tensor], whole: Any) -> Any:
    """A DTensor that lies as ``whole`` does, of what ``change`` makes of this rank's part."""
    known = {"shape": whole.shape, "stride": whole.stride()}
    return _dtensor().from_local(
        change(local_part(whole)), whole.device_mesh, whole.placements, run_check=False, **known
    )


def attached(places: Sequence[tuple[LocalParameters, str]]) -> Sequence[torch.Tensor]:
    """Parts whose gradients become DTensors, the parameters', that lie on the mesh as :attr:`LocalParameters.gradients`
    say. They are made in each call: FSDP2 takes the gradients of a layer when those of its inputs are there, and
    autograd runs the latest node first."""
    parts: Sequence[torch.Tensor] = _LocalTensors.apply(places, *[holder.parameters[key] for holder, key in places])
    return parts


def with_attached(
    leaves: Sequence[torch.Tensor], places: Sequence[tuple[int, LocalParameters, str]]
) -> list[torch.Tensor]:
    """``leaves``, with what :func:`attached` gives in their places."""
    found = list(leaves)
    for (k, _, _), part in zip(places, attached([(holder, key) for _, holder, key in places]), strict=True):
        found[k] = part
    return found


class _LocalTensors(torch.autograd.Function):
    """This rank's parts of DTensors."""

    @staticmethod
    def forward(context: Any, places: Sequence[tuple[LocalParameters, str]], *wholes: Any) -> tuple[torch.Tensor, ...]:
        context.places = places
        context.lie = [(whole.device_mesh, whole.shape, whole.stride()) for whole in wholes]
        context.set_materialize_grads(False)
        return tuple([local_part(whole).detach() for whole in wholes])

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        found: list[Any] = [None]
        for (holder, key), (mesh, shape, stride), grad in zip(context.places, context.lie, grads, strict=True):
            whole = None
            if grad is not None:
                lies = holder.gradients[key]
                whole = _dtensor().from_local(grad, mesh, lies, run_check=False, shape=shape, stride=stride)
            found.append(whole)
        return tuple(found)


def _dtensor() -> Any:
    module: Any = sys.modules["torch.distributed.tensor"]  # there is a DTensor
    return module.DTensor
