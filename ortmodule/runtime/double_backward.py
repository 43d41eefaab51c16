"""Runs a forward once more in PyTorch, for gradients that can be differentiated again.

``create_graph=True`` wants gradients as functions of what they depend on. The engine gives numbers, so the forward that
belongs to them runs again in PyTorch: on the inputs, buffers and parameters that it had, in the modes that it ran in,
with the masks that the engine drew, and what it found in attributes that are no operands (`calls/state_before.py`).
Buffers, attributes and generators are afterwards as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

from ortmodule.capture.dynamic_dims import Capture
from ortmodule.capture.trace_record import Write
from ortmodule.core import devices, pytree
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import Incomparable, StateError
from ortmodule.core.objects.tensor_copies import with_attributes
from ortmodule.engine.session import Session
from ortmodule.guards.guards import Guards
from ortmodule.guards.inventory import Slot
from ortmodule.guards.isolation import places_of
from ortmodule.guards.module_tree import Tree
from ortmodule.guards.sharding.local_parameters import LocalParameters, attached
from ortmodule.host.fallback import only_pytorch
from ortmodule.runtime.calls.state_before import StateBefore
from ortmodule.runtime.rng_replay import RngReplay, replaying


class ModuleModes:
    """How a module runs: training flags, autocast, the default type."""

    def __init__(self, tree: Tree) -> None:
        self.training = [(module, module.training) for module in tree.modules.values()]
        self.autocast = devices.autocast()
        self.default = torch.get_default_dtype()

    @contextmanager
    def set(self) -> Iterator[None]:
        """Inside, it is as it was when this was made. Isolation puts the training flags back, as all attributes."""
        default = torch.get_default_dtype()
        try:
            for module, training in self.training:
                module.__dict__["training"] = training
            torch.set_default_dtype(self.default)
            with devices.autocast_as(self.autocast, cache=False), torch.enable_grad():
                yield
        finally:
            torch.set_default_dtype(default)


class RecomputableGraph(Protocol):
    """A graph whose forward can be run again (:class:`~ortmodule.runtime.compiled_graph.CompiledGraph`)."""

    capture: Capture
    tree: Tree
    guards: Guards
    modes: ModuleModes
    session: Session
    feeds: list[int | Slot]  # by input: the number of the caller's tensor, or a place of the module
    leaves: list[int]  # inputs that need a gradient
    pairs: frozenset[int]  # inputs that are complex numbers as pairs
    writes: list[tuple[int | Slot, Write]]


def recomputed_results(
    graph: RecomputableGraph, forward: Callable, arguments: pytree.Structure, inputs: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor], seed: int, before: StateBefore | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
    """The tensors of what ``forward`` returns for ``inputs``, in the order of the graph's sources; and what stands for
    leaves.

    ``tensors``: what the graph was fed, as it was before the forward; ``seed``: of its run. What stands for a leaf is a
    view of it: gradients with respect to it pass no hooks of the caller's.

    Raises RuntimeError when the module has changed, or draws numbers that cannot be drawn again.
    """
    if any(write.carries for _, write in graph.writes):
        raise StateError("create_graph=True: forward changes an argument in place, and the result carries a gradient")
    if any(node.generators for node in graph.capture.trace.nodes):
        raise StateError("create_graph=True: forward draws from a torch.Generator, which cannot be done again")
    feeds = dict(zip(graph.session.inputs, tensors, strict=True))
    tree: Tree = graph.tree
    try:
        values = RngReplay(graph.capture.model, graph.session.known).of({n: t.detach() for n, t in feeds.items()}, seed)
        masks = replaying(tree, graph.capture.trace.nodes, values)
        with before.there() if before is not None else nullcontext():
            _check_unchanged(graph)
            with tree.isolated() as copies, graph.modes.set(), only_pytorch(), masks:
                if before is not None:
                    before.put_back()
                given = _inputs(graph, inputs, tensors)
                given_leaves = list(given)
                for feed in [graph.feeds[i] for i in graph.leaves if i in graph.pairs]:
                    if isinstance(feed, int):
                        given_leaves[feed] = as_pairs(given[feed])
                        given[feed] = torch.view_as_complex(given_leaves[feed])
                stands = _replace_state(graph, tree, copies, tensors)
                results = graph.capture.trace.eager(forward, arguments, given)
    except Incomparable as error:
        raise StateError(f"create_graph=True through random numbers that cannot be drawn again: {error}") from error
    leaves = []
    for i in graph.leaves:
        feed = graph.feeds[i]
        leaves.append(given_leaves[feed] if isinstance(feed, int) else stands[feed])
    return results, leaves


def _check_unchanged(graph: RecomputableGraph) -> None:
    graph.tree.attributes.look(graph.tree.described_names())
    if (name := graph.guards.broken_name()) is not None:
        raise StateError(f"create_graph=True: the attribute {name} of the module was changed since its forward")


def _inputs(
    graph: RecomputableGraph, inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The inputs as they were. Those that need a gradient as views, whose gradients pass no hooks of the caller's."""
    given = [t.view_as(t) if t.requires_grad else t.clone() for t in inputs]  # running statistics change again
    given = [with_attributes(copy, t) for copy, t in zip(given, inputs, strict=True)]
    written = {write.target.key for _, write in graph.writes if write.target.kind == "input"}
    for feed, tensor in zip(graph.feeds, tensors, strict=True):
        if isinstance(feed, int) and feed in written:
            given[feed] = with_attributes(tensor.detach().clone(), inputs[feed])
    return given


def _replace_state(
    graph: RecomputableGraph, tree: Tree, copies: dict[str, torch.Tensor], tensors: Sequence[torch.Tensor]
) -> dict[Slot, torch.Tensor]:
    """Buffers get their contents of then; parameters become views of themselves. Returns what stands for a slot."""
    stands = {}
    for i, (feed, tensor) in enumerate(zip(graph.feeds, tensors, strict=True)):
        if isinstance(feed, int):
            continue
        if feed in tree.counters:
            feed.set(tensor)
            continue
        held = feed.get()
        if feed.name in copies and not held.requires_grad:
            with torch.no_grad():
                tensor = torch.view_as_complex(tensor) if i in graph.pairs else tensor
                if held.shape == tensor.shape:
                    held.copy_(tensor)
                else:
                    held.set_(tensor.clone())  # type: ignore[call-overload]  # torch takes a tensor, too
        elif tensor.requires_grad:
            if isinstance(feed.holder, LocalParameters):
                whole, stands[feed] = feed.leaf, attached([(feed.holder, str(feed.key))])[0]
                like = feed.holder.like(str(feed.key), stands[feed])
                for holder, key in places_of(whole, tree):
                    holder[key] = like
                continue
            view = tensor.view_as(tensor)
            places = places_of(held, tree)
            stands[feed] = view if places else as_pairs(held)
            for holder, key in places:
                holder[key] = torch.view_as_complex(view) if i in graph.pairs else view
    return stands
