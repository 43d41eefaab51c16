"""Finds submodules that are graphs of their own where PyTorch runs the module around them.

A detection model decides with the boxes that it finds what it computes, and cannot be captured; its backbone can. What
PyTorch runs in between costs the time that it takes to meet the calls of these submodules, so they are looked for only
where calls are long.
"""

from __future__ import annotations

import torch
from torch import nn

from ortmodule.core.errors import Cause, NoOtherGraph, NotInEngine
from ortmodule.guards.module_hooks import HOOKS
from ortmodule.guards.module_tree import Tree
from ortmodule.runtime.capture_budget import OFTEN, Budget

#: Each is captured by itself: of a module with more of them none is.
MOST = 16
#: Calls in PyTorch after which they are looked for.
LEAST_CALLS = 8
#: Of such a call, forward and backward: where calls are shorter nothing is gained.
LEAST_SECONDS = 0.01


def may_pay(budget: Budget, reason: NotInEngine) -> bool:
    """Are parts of a module to be looked for, which PyTorch runs for this reason?"""
    if not isinstance(reason, NoOtherGraph) or reason.cause is not Cause.TORCH_MODEL:
        return False
    calls = budget.refused.calls
    if torch.are_deterministic_algorithms_enabled():  # no clock decides
        return calls >= max(LEAST_CALLS, OFTEN)
    return calls >= LEAST_CALLS and budget.refused.seconds >= calls * LEAST_SECONDS


def parts_of(tree: Tree) -> dict[str, nn.Module]:
    """By path: the outermost submodules of more than one layer with weights, where there are not too many."""
    if tree.sharded or tree.parallel:
        return {}
    found: dict[str, nn.Module] = {}
    _add_parts(tree.modules[""], "", found)
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
    if any(hasattr(each, "_ortmodule") or isinstance(each, torch.jit.ScriptModule) for each in inside):
        return False
    return sum(bool(each._parameters) for each in inside) > 1
