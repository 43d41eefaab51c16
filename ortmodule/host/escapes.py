"""Finds what leaves an opaque submodule by another way than its results: tensors that hooks or containers keep.

Such a tensor belongs to the autograd graph of the submodule, which has to be the one that the rest of the module is in:
the submodule is a break of the graph then. It is looked for once, when the submodule runs in a trace.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ortmodule.core.objects.live_objects import Noted
from ortmodule.core.objects.references import other_references
from ortmodule.core.snapshot import TensorMemory
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.writes.holders import holders_of, is_of_context
from ortmodule.guards.writes.surroundings import GlobalState, state_of_function
from ortmodule.host.host_node import Node


class Young:
    """The tensors that are made from now on, until :meth:`tensors` is called."""

    def __init__(self) -> None:
        self._noted = Noted((torch.Tensor,))
        self._there = {id(t): weakref.ref(t) for t in self._noted.all()}

    def tensors(self) -> list[torch.Tensor]:
        """Those that are new, and alive."""
        found = [t for t in self._noted.all() if (before := self._there.get(id(t))) is None or before() is not t]
        self.close()
        return found

    def close(self) -> None:
        """Also where it was closed."""
        self._noted.close()


def _keeper(tensor: torch.Tensor, ours: Sequence[Any]) -> Any:
    """What refers to a tensor, but for lists of ours, frames and autograd's own objects; None: nothing does."""
    return next((each for each in holders_of([tensor], list(ours)) if not is_of_context(each)), None)


def kept(
    name: str, leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor], others: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor], ours: Sequence[Any],
) -> list[tuple[str, torch.Tensor]]:  # fmt: skip
    """The tensors of the submodule ``name`` that something keeps, with a sentence on each.

    ``leaves``: what stands for its operands; ``others``: what attributes hold, which the graph sets;
    ``new``: the :class:`Young` ones behind it; ``ours``: lists and tuples that hold such tensors.
    """
    known = {id(t) for t in others}
    given = {id(t) for t in leaves}
    candidates = [
        t for t in new if id(t) not in known and (t.requires_grad if id(t) in given else t.grad_fn is not None)
    ]
    holders = (leaves, results, others, candidates, new, *ours)
    counts = Counter(id(each) for holder in holders for each in holder)
    found: list[tuple[str, torch.Tensor]] = []
    # But for lists of ours, of which `candidates` is one, something refers to these.
    suspects = [t for t, n in zip(candidates, other_references(candidates), strict=True) if n >= counts[id(t)]]
    for tensor in suspects:
        if (keeper := _keeper(tensor, (*holders, suspects))) is not None:
            what = "its input" if id(tensor) in given else "a tensor that it computes"
            text = (
                f"{what}, of shape {list(tensor.shape)}, leaves {name} by another way than its result "
                f"(a {type(keeper).__name__} keeps it)"
            )
            found.append((text, tensor))
    return found


def still_kept(tensor: torch.Tensor | None) -> bool:
    """Does something keep a tensor of a trace that is over?"""
    return tensor is not None and _keeper(tensor, ()) is not None


def changed_by_breaks(tree: Tree, nodes: Sequence[Node]) -> GlobalState:
    """What breaks and autograd functions among ``nodes`` may change: what is around them, parameters."""
    breaks = any(node.breaks for node in nodes)
    around = tree.around(tree.modules.values() if breaks else ())
    for slot in (slot for node in nodes for slot in node.writes):
        around.add(TensorMemory(slot.get()))
    functions: list[Any] = [node.function for node in nodes if node.kind == "function"]  # bound methods
    for cls in {function.__self__ for function in functions}:
        around.add(state_of_function(cls))
    return around
