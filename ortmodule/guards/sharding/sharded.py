"""Finds submodules that communicate when they are called, and calls them aside, without collectives.

FSDP2's hooks gather the parameters of a submodule and free them behind it; those of tensor parallelism exchange what a
submodule is given and returns. A rank that captures a graph calls submodules in which no other rank takes part. So
sharded ones get parameters of the same shapes and types there whose values are made up, one submodule at a time, and
what others would get from other ranks is what this one has.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ortmodule.core.snapshot import Items, Snapshot
from ortmodule.core.torch_private import sharding_types, tree_map_only
from ortmodule.guards.sharding.collectives import OfThisRank, values

#: How the attributes begin in which `fully_shard` keeps what it knows of a module: no part of its forward.
SHARDING_STATE = "__composable_api"


def is_sharded(cls: type) -> bool:
    """Are modules of this class those that `fully_shard` was called on?"""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # it takes long to import
    return fsdp is not None and issubclass(cls, fsdp.FSDPModule)


def is_parallel(module: nn.Module) -> bool:
    """Has `parallelize_module` made its parameters parts of larger ones, or given it hooks?"""
    if any(hasattr(p, "to_local") for p in module._parameters.values()):
        return True
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(map(is_of_parallel, hooks))


#: Parallel modules of which no graph could be made of what this rank computes: PyTorch runs them.
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_parts(modules: Iterable[nn.Module]) -> None:
    """From now on graphs leave these parallel modules to PyTorch."""
    _refused.update(modules)


def has_refused(modules: Iterable[nn.Module]) -> bool:
    return any(module in _refused for module in modules)


def _is_in_graphs(module: nn.Module) -> bool:
    """Is it a parallel module of which graphs have what this rank computes? All ranks have parts of the same size; a
    table that is split by words has gradients of the whole table in PyTorch."""
    if is_sharded(type(module)) or not is_parallel(module) or module in _refused:
        return False
    wholes: list[Any] = [p for p in module._parameters.values() if hasattr(p, "to_local")]
    for whole in wholes:
        sizes = list(whole.shape)
        for i, placement in enumerate(whole.placements):
            if placement.is_shard():
                size, ranks = sizes[placement.dim], whole.device_mesh.size(i)
                if size % ranks:
                    return False
                sizes[placement.dim] = size // ranks
            if placement.is_shard() and placement.dim == 0 and isinstance(module, nn.Embedding):
                return False
            if not placement.is_shard() and not placement.is_replicate():
                return False
    return not any(hasattr(t, "to_local") for t in (*module._buffers.values(), *vars(module).values()))


def is_of_parallel(hook: Any) -> bool:
    """Is it a hook of `parallelize_module`?"""
    return getattr(hook, "__module__", "").startswith("torch.distributed.tensor")


def communicating_in(modules: dict[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Of ``modules``, by path, the outermost ones that communicate by themselves, and the parallel ones that graphs
    have, with their communication; the root aside, whose hooks run around it."""
    sharded: dict[str, nn.Module] = {}
    parallel: dict[str, nn.Module] = {}
    for path, module in modules.items():
        if not path or any(path.startswith(f"{outer}.") for outer in sharded):
            continue
        if _is_in_graphs(module):
            parallel[path] = module
        elif is_sharded(type(module)) or is_parallel(module):
            sharded[path] = module
    return sharded, parallel


def waiting(module: nn.Module) -> Callable[..., Any]:
    """Calls ``module``, and waits for what a collective gives its results: others do not know such tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = module(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: t.clone() if hasattr(t, "trigger_wait") else t, result)

    return call


@contextmanager
def standing_in(units: Iterable[nn.Module], hooks: Iterable[str]) -> Iterator[None]:
    """Inside, ``units``, which communicate, do not. Those that are sharded get made-up parameters. None of their
    ``hooks``, which are the names of dictionaries of modules, is called, and what they change of their buffers is
    lost."""
    inside = [m for unit in units for m in unit.modules()]
    every = [m for m in inside if is_sharded(type(m))]
    parallel = [m for m in inside if not is_sharded(type(m)) and is_parallel(m)]
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
        for module in parallel:
            alone = _Alone()
            first = module.register_forward_pre_hook(alone.begin, prepend=True)
            stack.callback(first.remove)
            stack.callback(module.register_forward_hook(alone.end, always_call=True).remove)
        yield


class _Alone:
    """Keeps a parallel module from communicating while it runs."""

    def __init__(self) -> None:
        self._open: list[OfThisRank] = []

    def begin(self, module: nn.Module, args: tuple) -> None:
        self._open.append(OfThisRank())
        self._open[-1].__enter__()

    def end(self, module: nn.Module, args: tuple, result: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


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
        return nn.Parameter(_whole(tensor, kind or tensor.dtype, self._types.dimensions), tensor.requires_grad)


def _whole(shard: Any, kind: torch.dtype, dimensions: int) -> torch.Tensor:
    """Made-up values for what FSDP2 gathers of ``shard`` along the first ``dimensions`` of its mesh: where it has
    others, which are of tensor parallelism, a part of the whole."""
    mesh, shape = shard.device_mesh, shard.shape
    if mesh.ndim <= dimensions:
        return values(shape, kind, shard.device)
    names = tuple(mesh.mesh_dim_names[dimensions:])
    mesh, placements = mesh[names], shard.placements[dimensions:]
    sizes = list(shape)
    for i, placement in enumerate(placements):
        if placement.is_shard():
            sizes[placement.dim] //= mesh.size(i)
    made = values(torch.Size(sizes), kind, shard.device)
    return type(shard).from_local(made, mesh, placements, run_check=False)


def _cast(values: Any, kind: torch.dtype | None) -> Any:
    """``values`` with tensors of floats as ``kind``; None: as they are."""
    if kind is None:
        return values
    return tree_map_only(torch.Tensor, lambda t: t.to(kind) if t.is_floating_point() else t, values)
