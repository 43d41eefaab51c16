"""Finds submodules that are graphs of their own in what PyTorch runs: a module, or an island of its graph.

A detection model decides with the boxes that it finds what it computes, and cannot be captured; its backbone can. An
encoder that draws which of its layers it leaves out is an island; its layers can be captured. What PyTorch runs in
between costs the time that it takes to meet the calls of these submodules, so they are looked for only where calls are
long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import Cause, NoOtherGraph, NotInEngine
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.objects.weights import weights
from ortmodule.guards.module_hooks import HOOKS
from ortmodule.guards.module_tree import Tree
from ortmodule.host.fallback import EVERY_REASON, THREAD
from ortmodule.host.host_node import Node
from ortmodule.host.met_calls import recording
from ortmodule.host.passed_calls import Diverted
from ortmodule.runtime.calls.capture_budget import OFTEN, Budget

#: Each is captured by itself, and waits for its share of the time in steps: of a module with more of them none is.
MOST = 64
#: Calls in PyTorch after which they are looked for.
LEAST_CALLS = 8
#: Of such a call, forward and backward: where calls are shorter nothing is gained.
LEAST_SECONDS = 0.01
#: Calls after which one that none of them has called makes way for what is inside of it: forward may call
#: `self.model.decoder`, and not `self.model`.
LEAST_UNMET = 8
#: Of such a call, the share of its forward. Of an island no more is known.
FORWARD = 1 / 3
#: The share of a module's weights, those of embeddings aside, that the parts of its islands hold at least.
LEAST_WEIGHTS = 0.25


class Inner:
    """The submodules of one wrapped module that are graphs of their own inside of what PyTorch runs."""

    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        """``wrap``: the ORTModule of a submodule, always the same one."""
        self._wrap = wrap
        self._found: dict[str, dict[str, Any]] = {}  # by the path of what PyTorch runs, "" for the module
        self._tree: Tree | None = None  # in which they were looked for
        self._calls: dict[str, int] = {}  # of what PyTorch runs, by its path, since its parts were last looked through

    def may_be_of_whole(self, reason: NotInEngine) -> bool:
        """False: :meth:`of_whole` gives none."""
        return "" in self._found or isinstance(reason, NoOtherGraph)

    def of_whole(self, reason: NotInEngine, tree: Tree, budget: Budget) -> dict[str, nn.Module]:
        """Those of the module itself, which PyTorch runs for such a reason."""
        known = "" in self._found
        if self._tree is not tree and (known or may_pay(budget, reason)):
            self._find(tree, "", budget)
        return self._ready(tree, "", budget) if "" in self._found else {}

    def inside(self, path: str, tree: Tree, budget: Budget) -> AbstractContextManager:
        """What a call of the island at ``path`` runs in: its parts are graphs then."""
        if THREAD.only_pytorch:
            return nullcontext()
        if self._tree is not tree or path not in self._found:
            self._find(tree, path, budget)
        parts = self._ready(tree, path, budget)
        return recording(Diverted(tree, parts)) if parts else nullcontext()

    def found(self, whole: bool) -> dict[str, Any]:
        """By path, as ORTModules: those of the module, or those of its islands."""
        chosen = [units for path, units in self._found.items() if whole is (path == "")]
        return {path: unit for units in chosen for path, unit in units.items()}

    def draw(self) -> bool:
        """Do those of islands draw numbers, which PyTorch in their place would draw otherwise?"""
        return any(draws(dispatcher_of(unit)) for unit in self.found(False).values())

    def _find(self, tree: Tree, path: str, budget: Budget) -> None:
        if self._tree is not tree:
            self._tree, self._found = tree, {}
        self._found[path], self._calls[path] = self._wrapped(parts_of(tree, path), budget), 0

    def _wrapped(self, modules: dict[str, nn.Module], budget: Budget) -> dict[str, Any]:
        units = {where: self._wrap(module) for where, module in modules.items()}
        for unit in units.values():
            dispatcher_of(unit).fallback.silent = EVERY_REASON  # PyTorch runs what is around it, as is said
            budget.share_with(dispatcher_of(unit).budget)
        return units

    def _ready(self, tree: Tree, path: str, budget: Budget) -> dict[str, nn.Module]:
        """Those that have a graph; all where another capture fits: to meet calls that wait for one takes time, too."""
        units, fits = self._found[path], budget.may_capture_part()
        ready = without_hooked({where: unit for where, unit in units.items() if fits or _runs(dispatcher_of(unit))})
        self._calls[path] += fits
        if self._calls[path] > LEAST_UNMET:
            self._calls[path] = 0
            self._open(tree, units, [where for where in ready if not dispatcher_of(units[where]).usage.calls], budget)
        return ready

    def _open(self, tree: Tree, units: dict[str, Any], unmet: list[str], budget: Budget) -> None:
        """What is inside takes the places of those that are ``unmet``, from the next call on."""
        inside = {where: parts_of(tree, where) for where in unmet}
        if len(units) + sum(map(len, inside.values())) <= MOST:
            for where, parts in inside.items():
                if parts:
                    del units[where]
                    units.update(self._wrapped(parts, budget))


def _runs(dispatcher: Any) -> bool:
    return any(dispatcher.graphs.values()) or bool(dispatcher.parts.found(True))


def draws(dispatcher: Any) -> bool:
    """Do graphs of this one draw numbers, or those of its parts?"""
    random = any(graph.is_random for graphs in dispatcher.graphs.values() for graph in graphs)
    return random or any(
        draws(dispatcher_of(unit)) for whole in (False, True) for unit in dispatcher.parts.found(whole).values()
    )


def may_pay(budget: Budget, reason: NotInEngine) -> bool:
    """Are parts of a module to be looked for, which PyTorch runs for this reason?"""
    if not isinstance(reason, NoOtherGraph) or reason.cause is Cause.ONNX_MODEL:
        return False
    return _is_long(budget.refused.calls, budget.refused.seconds)


def breaks_of(nodes: Iterable[Node], tree: Tree) -> dict[str, str]:
    """By path: the islands among ``nodes`` that are to be breaks from now on, and why. Their parts become graphs of
    their own, or all that is before them runs twice in most calls, to find the sizes of what they return."""
    caches = tree.caches
    open_ones = [n for n in nodes if n.kind == "module" and not (n.name in caches.parted or n.name in caches.whole)]
    unsized = [n.name for n in open_ones if LEAST_CALLS <= n.spent.calls < 2 * n.spent.unforeseen]
    caches.unsized |= frozenset(unsized)
    breaks = {path: f"no call of {path} tells how large the results of the next one are" for path in unsized}
    paths = _parted(open_ones, tree)
    return breaks | {path: f"submodules of {path} are graphs of their own" for path in paths}


def _parted(nodes: Iterable[Node], tree: Tree) -> frozenset[str]:
    """The islands among ``nodes`` whose parts are to be graphs of their own from now on, by path."""
    caches = tree.caches
    found = {n.name: parts_of(tree, n.name) for n in nodes if _is_long(n.spent.calls, n.spent.seconds / FORWARD)}
    if not found:
        return frozenset()
    inside = weights(m for parts in found.values() for part in parts.values() for m in part.modules())
    if not inside or sum(inside.values()) < LEAST_WEIGHTS * sum(weights(tree.modules.values()).values()):
        caches.whole |= found.keys()
        return frozenset()
    return frozenset(path for path, parts in found.items() if parts)


def _is_long(calls: int, seconds: float) -> bool:
    if torch.are_deterministic_algorithms_enabled():  # no clock decides
        return calls >= max(LEAST_CALLS, OFTEN)
    return calls >= LEAST_CALLS and seconds >= calls * LEAST_SECONDS


def parts_of(tree: Tree, path: str = "") -> dict[str, nn.Module]:
    """By path: the outermost submodules of more than one layer with weights inside of the one at ``path``, where there
    are not too many."""
    if tree.sharded or tree.parallel:
        return {}
    found: dict[str, nn.Module] = {}
    _add_parts(tree.modules[path], path, found)
    return found if len(found) <= MOST else {}


def without_hooked(parts: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those without hooks of their own, which would be called with the wrapper in the module's place."""
    return {path: part for path, part in parts.items() if not any(vars(part).get(name) for name in HOOKS)}


def _add_parts(module: nn.Module, path: str, found: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # it is not called itself
            _add_parts(child, where, found)
        elif _is_part(child):
            found[where] = child


def _is_part(module: nn.Module) -> bool:
    inside = list(module.modules())
    if any(dispatcher_of(each) is not None or isinstance(each, torch.jit.ScriptModule) for each in inside):
        return False
    return sum(bool(each._parameters) for each in inside) > 1
