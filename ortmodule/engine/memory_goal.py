"""Says what a step may take of memory: levels of recomputation, budgets, and who holds gradients meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ortmodule.core.errors import OutOfMemoryError
from ortmodule.core.names import STATE

#: ("float32", (2, 3)): the type of elements, and the sizes.
Spec = tuple[str, tuple[int, ...]]
#: How long each takes beside a multiplication of a product in float32: one in 16 bits, one of another kernel, a byte.
Costs = tuple[float, float, float]
#: Those of a usual processor (csrc/plan/cost.c).
USUAL_COSTS: Costs = (0.0, 0.0, 0.0)
#: Tensors that an error about memory names (csrc/plan/peak.h).
MOST_NAMED = 3
#: The levels of recomputation: of layers, and of all that lowers the peak.
LAYERS_AGAIN, ALL_AGAIN = 1, 2
#: Bytes of gradients that get places in a run's arena, on the CPU; less is not worth a second placement.
JOINT_FROM = 25 << 20
#: Bytes of gradients that are handed over at one time, as in a bucket of DistributedDataParallel's.
SEGMENT_BYTES = 25 << 20
#: Segments of one backward, by bytes.
MOST_SEGMENTS = 32


class MemoryGoal(NamedTuple):
    """What a step may take. ``level``: of recomputation, as ``Config.memory_opt_level``; ``budget``: bytes, 0: any;
    ``beside``: bytes of the module that no plan is given, which the budget counts. ``clusters``: (cluster, strategy,
    count) of each that backward computes again in any case; unless it is None, plans list their clusters.
    ``offload``: a folder for activations that are offloaded where that costs less than to compute them again; without a
    budget or a level 2, all that lower the peak. ``joint_from``: bytes of gradients from which a run's arena may hold
    them, too; 0: it never does. ``in_segments``: those that are added to earlier ones come in segments, and not all at
    once. ``layers``: of level 1, the first so many of each row of layers; 0: all. ``costs``: says what operators cost
    on this machine's CPU, as ``Model.plan`` is told where a budget or level 2 chooses; None: as on a usual one."""

    level: int
    budget: int
    beside: int = 0
    clusters: tuple[tuple[str, int, int], ...] | None = None
    offload: str | None = None
    joint_from: int = 0
    in_segments: bool = True
    layers: int = 0
    costs: Callable[[], Costs] | None = None

    def measured_costs(self, level: int, budget: int) -> Costs:
        """The last argument of ``Model.plan``, for a step with this level and budget."""
        return self.costs() if self.costs is not None and (budget > 0 or level == ALL_AGAIN) else USUAL_COSTS

    @property
    def chooses(self) -> bool:
        """Does it matter for the choice of what is computed again who has the memory of gradients?"""
        return self.budget > 0 or self.joint_from > 0

    def of(
        self, names: Sequence[str], specs: Sequence[Spec], needs_grad: Sequence[bool], adds: bool = False
    ) -> tuple[int, int]:
        """Two arguments of ``Model.plan``, for inputs of these names. ``adds``: gradients of earlier steps are there.
        MemoryError where nothing is left for a step."""
        if not self.budget:
            return self.level, 0
        inputs = [bytes_of(spec) for spec in specs]
        grads = [count for count, needs in zip(inputs, needs_grad, strict=True) if needs]
        held = self.beside + sum(inputs) + sum(grads) + (self._on_their_way(grads) if adds else 0)
        if held >= self.budget:
            largest = sorted(zip(names, inputs, strict=True), key=lambda pair: -pair[1])[:MOST_NAMED]
            listed = ", ".join(f"{name.removeprefix(STATE)} with {count} bytes" for name, count in largest)
            added = ", those that are added to earlier ones included" if adds else ""
            raise OutOfMemoryError(
                f"parameters, buffers, inputs and their gradients{added} take {held} bytes, and the memory budget is "
                f"{self.budget} bytes; the largest: {listed}"
            )
        return self.level, self.budget - held

    def _on_their_way(self, grads: Sequence[int]) -> int:
        """Bytes of gradients at one time, at most, that have been made and not yet been added."""
        if not self.in_segments or not grads:
            return sum(grads)
        return min(sum(grads), segment_bytes(sum(grads)) + max(grads))


def segment_bytes(all_gradients: int) -> int:
    """A segment ends with the gradient that completes so many bytes. ``all_gradients``: bytes."""
    return max(SEGMENT_BYTES, all_gradients // MOST_SEGMENTS)


def bytes_of(spec: Spec) -> int:
    """Of a tensor of this type and shape."""
    return math.prod(spec[1]) * getattr(torch, spec[0]).itemsize
