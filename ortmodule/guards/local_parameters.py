"""Gives graphs this rank's parts of DTensor parameters, and makes DTensors of their gradients."""

from __future__ import annotations

import sys
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

    A part has the parameter's memory and is no leaf of autograd's: its gradient becomes a DTensor, the parameter's,
    that lies on the mesh as :attr:`gradients` says. The same tensor is handed out as long as the parameter is the same.
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
            made = self._made[key] = Made(whole, local_part(whole), self._part(whole, key))
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

    def _part(self, whole: Any, key: str) -> torch.Tensor:
        if not whole.requires_grad:
            return local_part(whole).detach()
        with untraced(), torch.inference_mode(False), torch.enable_grad():
            return _Part.apply(whole, self, key)


class _Part(torch.autograd.Function):
    """This rank's part of a DTensor."""

    @staticmethod
    def forward(context: Any, whole: Any, holder: LocalParameters, key: str) -> torch.Tensor:
        context.holder, context.key = holder, key
        context.lies = whole.device_mesh, whole.shape, whole.stride()
        context.set_materialize_grads(False)
        return local_part(whole).detach()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor | None) -> tuple[Any, None, None]:
        if grad is None:
            return None, None, None
        mesh, shape, stride = context.lies
        placements = context.holder.gradients[context.key]
        whole = _dtensor().from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)
        return whole, None, None


def _dtensor() -> Any:
    module: Any = sys.modules["torch.distributed.tensor"]  # there is a DTensor
    return module.DTensor
