"""Gathers a model and an optimizer that are divided among processes into whole ones, and divides whole ones again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn


class WholeNames:
    """The parameters of a whole model by name, in the order of the whole optimizer; read before it is divided."""

    def __init__(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self.groups = [[names[id(p)] for p in group["params"]] for group in groups]

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    def part(self, groups: Sequence[Mapping[str, Any]], own: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Groups of an optimizer for the parameters in ``own`` alone."""
        found = [
            {**g, "params": [own[n] for n in some if n in own]} for g, some in zip(groups, self.groups, strict=True)
        ]
        return [group for group in found if group["params"]]


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model without memory for its weights; buffers are copied."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def _whole(tensor: Any) -> Any:
    """A DTensor becomes all of it: all processes call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _part_of(whole: Tensor, like: Any) -> Tensor:
    """What this process has of ``whole``, as ``like`` is cut."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


def gathered_weights(model: nn.Module, own: Iterable[str] | None) -> dict[str, Any]:
    """Weights and buffers of all processes, on rank 0. ``own``: names of those that are here; None: all."""
    state = {name: _whole(tensor) for name, tensor in _here(model, own)}
    if own is None:
        return state
    joined: dict[str, Any] = {}
    for other in _at_first(state):
        joined |= other
    return {name: joined[name] for name in model.state_dict() if name in joined}


def put_weights(model: nn.Module, whole: Mapping[str, Any], own: Iterable[str] | None) -> None:
    """Copies whole weights and buffers into what this process has of them."""
    with torch.no_grad():
        for name, tensor in _here(model, own):
            if isinstance(tensor, Tensor):
                tensor.copy_(_part_of(whole[name], tensor))


def _here(model: nn.Module, own: Iterable[str] | None) -> list[tuple[str, Any]]:
    """The entries of the model's state that this process has, under all of their names."""
    state = model.state_dict(keep_vars=True)
    if own is None:
        return [(name, _detached(value)) for name, value in state.items()]
    mine, tensors = set(own), {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(tensor): name for name, tensor in tensors.items()}
    return [(name, _detached(value)) for name, value in state.items() if names.get(id(value), name) in mine]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def gathered_optimizer(optimizer: Any, names: WholeNames, own: Mapping[str, Tensor], divided: bool) -> dict[str, Any]:
    """The state dict that an optimizer of the whole model has, on rank 0. ``divided``: stages have other parameters."""
    by_tensor = {id(p): name for name, p in own.items()}
    state = {
        by_tensor[id(p)]: {key: _as_parameter(value, p) for key, value in values.items()}
        for p, values in optimizer.state.items()
    }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    placed = [(by_tensor[id(group["params"][0])], g) for group, g in zip(optimizer.param_groups, groups, strict=True)]
    joined, settings = dict(state), dict(placed)
    if divided:
        for other_state, other_placed in _at_first((state, placed)):
            joined = {**other_state, **joined}
            settings |= dict(other_placed)
    if not joined and not settings or distributed.get_rank() != 0:
        return {}
    places = {name: i for i, name in enumerate(names.names)}
    whole_groups = []
    for some in names.groups:
        known = next(settings[name] for name in some if name in settings)
        whole_groups.append({**known, "params": [places[name] for name in some]})
    return {"state": {places[name]: joined[name] for name in names.names if name in joined},
            "param_groups": whole_groups}  # fmt: skip


def _as_parameter(value: Any, p: Any) -> Any:
    """State as large as the whole parameter."""
    if not isinstance(value, Tensor) or not hasattr(p, "full_tensor"):
        return value
    if not hasattr(value, "full_tensor") and value.shape == p.to_local().shape and value.dim():
        from torch.distributed.tensor import DTensor

        value = DTensor.from_local(value, p.device_mesh, p.placements, run_check=False)
    return _whole(value)


def put_optimizer(optimizer: Any, whole: Mapping[str, Any], names: WholeNames, own: Mapping[str, Tensor]) -> None:
    """Loads the state dict of an optimizer of the whole model into one of this process's part."""
    places = {name: i for i, name in enumerate(names.names)}
    order = [name for some in names.groups for name in some if name in own]
    local = {name: i for i, name in enumerate(order)}
    state = {}
    for name in order:
        if places[name] in whole["state"]:
            values = whole["state"][places[name]]
            state[local[name]] = {
                key: _part_of(value, own[name]) if _is_like(value, own[name]) else value
                for key, value in values.items()
            }
    groups = []
    for saved, some in zip(whole["param_groups"], names.groups, strict=True):
        here = [local[name] for name in some if name in own]
        if here:
            groups.append({**saved, "params": here})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _is_like(value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape and value.dim() > 0


def _at_first(mine: Any) -> list[Any]:
    """What each process has, on rank 0; nothing on others."""
    first = distributed.get_rank() == 0
    found: list[Any] | None = [None] * distributed.get_world_size() if first else None
    distributed.gather_object(mine, found)
    return found or []
