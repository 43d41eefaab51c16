"""Finds where the tensors of a graph stand: among the caller's inputs, by number, or in the module, by slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortmodule.capture.trace_record import Source, Write
from ortmodule.core.names import INPUT, STATE
from ortmodule.guards.inventory import Slot
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.local_parameters import LocalParameters


def feed_of(name: str, tree: Tree) -> int | Slot:
    """Of the graph's input of this name."""
    if name.startswith(INPUT):
        return int(name.removeprefix(INPUT))
    return tree.slots[name.removeprefix(STATE)]


def fed(feeds: Sequence[int | Slot], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that stand there now."""
    return [inputs[feed] if isinstance(feed, int) else feed.get() for feed in feeds]


def target_of(target: Source, tree: Tree) -> int | Slot:
    """Of what forward writes to."""
    return target.key if target.kind == "input" else tree.slots[target.key]


def written_in_place(writes: Sequence[tuple[int | Slot, Write]]) -> tuple[list[int | Slot], list[tuple[int, int]]]:
    """What is written in place; inputs among it whose new contents carry a gradient, and outputs that hold these."""
    written = [target for target, write in writes if not write.replaces]
    carried = [(t, w.output) for t, w in writes if w.carries and isinstance(t, int) and w.output is not None]
    return written, carried


def dtensors_among(leaves: Sequence[int | Slot]) -> list[tuple[int, LocalParameters, str]]:
    """Which of ``leaves`` are this rank's parts of DTensors, and where these are."""
    places = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Slot)]
    return [(k, slot.holder, str(slot.key)) for k, slot in places if isinstance(slot.holder, LocalParameters)]
