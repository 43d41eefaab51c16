"""Says which tensors the engine can compute with, and what state of PyTorch each kind of device has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ortmodule import _core

#: Kinds of devices that the engine knows.
TYPES = ("cpu", "cuda")

#: Of each kind of device, whether autocast is on, and its type.
Autocast = tuple[tuple[bool, torch.dtype], ...]


def refusal(tensors: Iterable[tuple[str, Any]]) -> str | None:
    """Why the engine cannot compute with these (name, tensor), as far as it is about devices; or None."""
    first, there = None, None
    for name, tensor in tensors:
        if tensor.device.type not in TYPES:
            return f"{name} is on {tensor.device}"
        if first is None:
            first, there = name, tensor.device
        elif tensor.device != there:
            return f"{name} is on {tensor.device}, {first} on {there}"
    if first is None or there is None or there.type == "cpu":
        return None
    try:
        _core.cuda_devices()
    except _core.Error as error:
        return f"{first} is on {there}: {error}"
    return None


def autocast() -> Autocast:
    """How autocast is now."""
    return tuple([(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in TYPES])


def autocast_off() -> Autocast:
    return tuple([(False, torch.get_autocast_dtype(kind)) for kind in TYPES])


@contextmanager
def autocast_as(then: Autocast, cache: bool = True) -> Iterator[None]:
    """Inside, autocast is as it was ``then``. ``cache``: casts of weights are kept, as PyTorch does."""
    with ExitStack() as stack:
        for kind, was, now in zip(TYPES, then, autocast(), strict=True):
            if was != now or (was[0] and not cache):
                stack.enter_context(torch.autocast(kind, was[1], enabled=was[0], cache_enabled=cache))
        yield


def generators() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The states of PyTorch's generators: the CPU's and, once there are any, those of the GPUs."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_generators(states: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    """Puts back what :func:`generators` returned."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])
