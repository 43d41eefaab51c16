"""Finds submodules whose parameters FSDP2 shards, and calls them aside, with other parameters and without collectives.

FSDP2's hooks gather the parameters of such a submodule when it is called, and free them behind it. A rank that captures
a graph calls submodules in which no other rank takes part, so there they get parameters of the same shapes and types
whose values are made up, one submodule at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ortmodule.core.snapshot import Items, Snapshot
from ortmodule.core.torch_private import sharding_types, tree_map_only

#: How the attributes begin in which `fully_shard` keeps what it knows of a module: no part of its forward.
SHARDING_STATE = "__composable_api"
#: How many made-up values there are before they come again: no power of two, which would be a row.
_PERIOD = 1021


def is_sharded(cls: type) -> bool:
    """Are modules of this class those that `fully_shard` was called on?"""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # it takes long to import
    return fsdp is not None and issubclass(cls, fsdp.FSDPModule)


def sharded_in(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The outermost sharded ones of ``modules``, which have their paths; the root aside, whose hooks run around it."""
    found: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if path and is_sharded(type(module)) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


@contextmanager
def standing_in(units: Iterable[nn.Module], hooks: Iterable[str]) -> Iterator[None]:
    """Inside, calls of ``units``, which are sharded, get made-up parameters. None of their ``hooks``, which are the
    names of dictionaries of modules, is called, and what they change of their buffers is lost."""
    every = [m for unit in units for m in unit.modules() if is_sharded(type(m))]
    names = tuple(hooks)
    kept = [m.__dict__[name] for m in every for name in names]
    with Snapshot([Items(each) for each in kept]).around(), ExitStack() as stack:
        for each in kept:
            each.clear()
        for module in every:
            stand = _StandIn(module)
            handles = (
                module.register_forward_pre_hook(stand.begin, with_kwargs=True),
                module.register_forward_hook(stand.end, always_call=True),
            )
            for handle in handles:
                stack.callback(handle.remove)
        yield


class _StandIn:
    """Puts made-up parameters in place while a sharded module runs."""

    def __init__(self, module: nn.Module) -> None:
        nested = [m for m in module.modules() if m is not module and is_sharded(type(m))]
        others = {id(m) for unit in nested for m in unit.modules()}
        self._own = [m for m in module.modules() if id(m) not in others]
        self._types = sharding_types(module)
        self._before: list[list[tuple[dict, str, Any]]] = []  # of each call that has begun

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        before: list[tuple[dict, str, Any]] = []
        self._before.append(before)
        made: dict[int, Any] = {}
        for part in self._own:
            for holder in (part._parameters, part._buffers, part.__dict__):
                for key, tensor in list(holder.items()):
                    if isinstance(tensor, torch.Tensor):
                        before.append((holder, key, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = self._made(tensor)
                        holder[key] = made[id(tensor)]
        return _cast((args, kwargs), self._types.inputs)

    def end(self, module: nn.Module, args: tuple, result: Any) -> Any:
        if self._before:  # else an error came before it began
            for holder, key, tensor in self._before.pop():
                holder[key] = tensor
        return _cast(result, self._types.outputs)

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if not hasattr(tensor, "to_local"):
            copy = tensor.detach().clone()
            return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        kind = self._types.parameters if tensor.is_floating_point() else None
        return nn.Parameter(_values(tensor, kind or tensor.dtype), tensor.requires_grad)


def _values(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Values of a parameter's size: around 1 for one of rank 1, around 0 for a matrix, whose products stay small."""
    shape, device = tensor.shape, tensor.device
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    parts = torch.arange(1, _PERIOD + 1, dtype=torch.float64, device=device).mul((5**0.5 - 1) / 2).fmod(1)
    some = parts / 2 + 0.75 if len(shape) < 2 else (parts - 0.5) * (3.0 / max(1, shape[1:].numel()) ** 0.5)
    count = shape.numel()
    return some.to(kind).repeat(-(-count // _PERIOD))[:count].reshape(shape)


def _cast(values: Any, kind: torch.dtype | None) -> Any:
    """``values`` with tensors of floats as ``kind``; None: as they are."""
    if kind is None:
        return values
    return tree_map_only(torch.Tensor, lambda t: t.to(kind) if t.is_floating_point() else t, values)
