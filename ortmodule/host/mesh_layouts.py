"""Knows how DTensors and their gradients lie on a mesh of processes, and has the nodes that move them.

How a gradient lies follows from what uses its tensor, by PyTorch's rules: of what is split, the gradient is split
alike; of what has to be added up it is whole; of what every rank has it is a part of a sum where ranks have computed
other things with it. So the same collectives run as in PyTorch, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortmodule.core.errors import NotTraceable
from ortmodule.guards.inventory import Slot
from ortmodule.host.collectives import number_of

#: Of each mesh dimension.
Placements = tuple[Any, ...]


class MeshLayout:
    """How a tensor lies on a mesh, and its gradient."""

    def __init__(
        self, mesh: Any, placements: Sequence[Any], sources: Sequence[tuple[MeshLayout, Placements]] = ()
    ) -> None:
        """``sources``: what it is computed from, and how that lies where it is used."""
        self.mesh, self.placements, self.sources = mesh, tuple(placements), sources
        self.moved: MeshLayout | None = None  # what it was before a redistribution
        self.needs = True  # a gradient
        #: (a tensor, its dimension that was split, among how many) where parts may not be as large as others: PyTorch
        #: would know how large all are.
        self.unsure: list[tuple[torch.Tensor, int, int]] = []
        for source, _ in sources:
            self.unsure += source.unsure
        self.parameter: Slot | None = None
        self.arriving: set[Placements] = set()  # of its gradients
        self.gradient: Placements = self.default()

    def default(self) -> Placements:
        """How its gradient lies where nothing else says so."""
        return tuple([mesh_types().Replicate() if p.is_partial() else p for p in self.placements])

    def settle(self) -> None:
        """Says how the gradient lies, and to its sources how theirs arrive. Raises NotTraceable."""
        if not self.needs:
            return
        if len(self.arriving) > 1:
            raise NotTraceable(f"gradients of a DTensor that lies as {self.placements} arrive as {self.arriving}")
        self.gradient = next(iter(self.arriving), self.default())
        for source, used in self.sources:
            source.arriving.add(tuple(map(_arriving, used, self.placements, self.gradient)))
        if self.moved is not None:
            pairs = zip(self.moved.placements, self.gradient, strict=True)
            whole = mesh_types().Replicate()
            self.moved.arriving.add(tuple([whole if p.is_partial() and not g.is_partial() else p for p, g in pairs]))

    def sizes(self, part: Sequence[Any]) -> list[Any]:
        """Those of the whole tensor, where ranks have parts as large as this one's."""
        sizes = list(part)
        for i, placement in enumerate(self.placements):
            if placement.is_shard():
                sizes[placement.dim] = sizes[placement.dim] * self.mesh.size(i)
        return sizes

    def move(
        self, tensor: torch.Tensor, placements: Placements, target: Placements, sizes: Sequence[int] | None = None,
        later: bool = False,
    ) -> Any:  # fmt: skip
        """``tensor``, which lies on the mesh as ``placements``, as ``target`` has it. ``sizes``: of the whole tensor,
        where parts differ. ``later``: it may be one that is to be waited for."""
        if placements == target:
            return tensor
        known: dict[str, Any] = {}
        if sizes is not None:
            known = {"shape": torch.Size(sizes), "stride": torch.empty(sizes, device="meta").stride()}
        with torch.no_grad():
            whole = mesh_types().DTensor.from_local(tensor.detach(), self.mesh, placements, run_check=False, **known)
            found = whole.redistribute(placements=target, async_op=later).to_local()
        return found if later else _waited(found)

    def begin(self, tensor: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Sequence[int]]:
        """What waits for ``tensor``, which lies as :attr:`moved` does, to be here as this one, and its sizes then."""
        assert self.moved is not None, "it comes from somewhere"
        before, pairs = self.moved.placements, list(zip(self.moved.placements, self.placements, strict=True))
        other = [i for i, (p, q) in enumerate(pairs) if p != q]
        if len(other) != 1 or not pairs[other[0]][0].is_shard() or not pairs[other[0]][1].is_replicate():
            found = self.move(tensor, before, self.placements, later=True)
            return lambda: _waited(found), found.shape
        # Along another dimension than the first PyTorch would wait at once, to bring parts into their order.
        (i,) = other
        shard, dim = mesh_types().Shard, before[i].dim
        rest = [shard(p.dim + 1) if p.is_shard() else p for p in before]
        split = (*rest[:i], shard(0), *rest[i + 1 :])
        gathered = self.move(tensor[None], split, (*rest[:i], self.placements[i], *rest[i + 1 :]), later=True)
        sizes = [size * (self.mesh.size(i) if d == dim else 1) for d, size in enumerate(tensor.shape)]
        return lambda: torch.cat(_waited(gathered).unbind(0), dim), sizes


def mesh_types() -> Any:
    """The module of DTensor and of placements."""
    return sys.modules["torch.distributed.tensor"]  # which has made DTensors


def _waited(tensor: Any) -> torch.Tensor:
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


def _arriving(used: Any, made: Any, gradient: Any) -> Any:
    """How a gradient arrives along one dimension of a mesh, at what was ``used`` like this, of a result that was
    ``made`` and has a gradient like these."""
    if used.is_shard():
        return used
    if used.is_partial():
        return mesh_types().Replicate()
    if made.is_replicate():
        return gradient
    return mesh_types().Partial()


class _Entered(torch.autograd.Function):
    """A tensor becomes a part of a DTensor: nothing happens but to its gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, layout: MeshLayout) -> torch.Tensor:
        context.layout = layout
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout = context.layout
        return layout.move(grad, layout.gradient, layout.default()), None


class _Sent(torch.autograd.Function):
    """What stands for a tensor that is on its way to another layout: zeros. Backward communicates, too."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, sizes: Sequence[int], layout: MeshLayout) -> torch.Tensor:
        assert layout.moved is not None, "it comes from somewhere"
        context.layout, context.sizes = layout, layout.moved.sizes(tensor.shape)
        return tensor.new_zeros(sizes)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        layout, before = context.layout, context.layout.moved
        pairs = zip(before.placements, layout.gradient, strict=True)
        whole = mesh_types().Replicate()
        target = tuple([whole if p.is_partial() and not g.is_partial() else p for p, g in pairs])
        return layout.move(grad, layout.gradient, target, sizes=context.sizes), None, None


def enter(layout: MeshLayout, tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as this rank's part of a DTensor that lies as ``layout``; its gradient is moved."""
    return _Entered.apply(tensor, layout)


def send(layout: MeshLayout, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Begins to move ``tensor`` to where ``layout`` has it: the number to wait by, and zeros in its place."""
    wait, sizes = layout.begin(tensor)
    return [number_of(lambda: [wait()]), _Sent.apply(tensor, sizes, layout)]
