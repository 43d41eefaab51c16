"""Divides a plan's backward into segments, whose gradients may be handed over while it goes on.

A :class:`Segment` ends where the engine needs neither some gradients nor their parameters any more: a hook may change
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortmodule import _core
from ortmodule.engine.memory_goal import bytes_of, segment_bytes


@dataclass
class Segment:
    """A range of a plan's backward instructions whose gradients are handed over together."""

    first: int  # instructions
    last: int
    leaves: list[int]  # whose gradients it completes: places among the leaves
    inputs: list[int]  # that it reads
    outputs: list[int]
    grads: list[tuple[int, Any]]  # inputs whose gradients' memory it is the first to use, and what that is like


def segments_of(plan: _core.Plan, leaves: Sequence[int], each: bool) -> list[Segment]:
    """In the order of backward; none if one node is enough. ``leaves``: inputs. ``each``: no gradient waits for
    another that is completed later."""
    specs = plan.input_grads
    sizes: dict[int, int] = {i: bytes_of(spec) for i in leaves if (spec := specs[i]) is not None}
    size = 1 if each else segment_bytes(sum(sizes.values()))
    if sum(sizes.values()) <= size:
        return []
    lives = plan.gradient_lives
    begin, end = plan.nodes[0], sum(plan.nodes)
    ends = [begin if life is None else life[1] for life in lives]
    cuts, filled, last = [begin], 0, begin
    for i in sorted(sizes, key=ends.__getitem__):
        if filled >= size and ends[i] > last:
            cuts.append(last)
            filled = 0
        filled, last = filled + sizes[i], ends[i]
    cuts.append(end)
    if len(cuts) == 2:
        return []
    found = []
    for first, last in zip(cuts, cuts[1:], strict=False):
        least = first + 1 if first > begin else 0
        # A leaf without a gradient belongs to the first.
        own = [k for k, i in enumerate(leaves) if least <= ends[i] <= last]
        grads = [(i, specs[i]) for i, life in enumerate(lives) if life is not None and first <= life[0] < last]
        inputs, outputs = plan.reads(first, last)
        found.append(Segment(first, last, own, inputs, outputs, grads))
    return found
