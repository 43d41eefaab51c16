"""Says what each of several processes has of a model and of a batch, and joins what they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ortmodule.core import devices
from ortmodule.core.errors import ArgumentError, StateError
from ortmodule.trainer.options import ORTTrainerOptions


class Processes:
    """All processes of a training, as a mesh of pipeline x data x horizontal, the last axis the fastest.

    ``data_size``, ``data_rank``: how many have other batches, and which this one has. ``model_group``: those that have
    the parts of one model; None, if this process has all of it.

    Raises ValueError for options that do not fit the process group, RuntimeError where there is none.
    """

    def __init__(self, options: ORTTrainerOptions) -> None:
        sizes = options.distributed
        self.size, self.rank = sizes.world_size, sizes.world_rank
        self.pipeline_size, self.horizontal_size = sizes.pipeline_parallel_size, sizes.horizontal_parallel_size
        self.data_size = self.size // (self.pipeline_size * self.horizontal_size)
        self.data_rank = self.rank // self.horizontal_size % self.data_size
        self.mesh: Any = None
        self.model_group: Any = None
        self._data_group: Any = None
        if self.size > 1:
            check_group(self.size, self.rank)

    @property
    def divide_the_model(self) -> bool:
        """Whether a process has a part of the model alone."""
        return self.pipeline_size * self.horizontal_size > 1

    def connect(self, device: torch.device) -> None:
        """Makes the groups; all processes call it."""
        from torch.distributed.device_mesh import init_device_mesh  # it has a process group at hand by now

        shape = (self.pipeline_size, self.data_size, self.horizontal_size)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "horizontal"))
        self.model_group = self.mesh.get_group("pipeline" if self.pipeline_size > 1 else "horizontal")
        self._data_group = self.mesh.get_group("data")

    def start_alike(self, model: nn.Module) -> None:
        """All processes get the weights and buffers of the first, and those of one model its generators' states."""
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                sent = tensor.contiguous()
                distributed.broadcast(sent, 0)
                if sent is not tensor:
                    tensor.copy_(sent)
        states = [devices.generators()]
        distributed.broadcast_object_list(states, distributed.get_global_rank(self.model_group, 0), self.model_group)
        devices.set_generators(states[0])

    def check_alike(self, inputs: Sequence[Any], names: Sequence[str]) -> None:
        """Raises ValueError, which names the input, where processes of one model have got other inputs."""
        marks = [(list(t.shape), t.double().sum().item()) if isinstance(t, Tensor) else repr(t) for t in inputs]
        found: list[Any] = [None] * distributed.get_world_size(self.model_group)
        distributed.all_gather_object(found, marks, self.model_group)
        for i, name in enumerate(names[: len(marks)]):
            if any(other[i] != found[0][i] and other[i] == other[i] for other in found):
                raise ArgumentError(
                    f"the input {name} is another in another process, and these processes have the parts of one model: "
                    "they are given the same inputs (trainer.data_parallel_rank says which part of the data)"
                )

    def agree(self, answer: bool) -> bool:
        """Whether all processes of one model say yes."""
        said = torch.tensor(int(answer), device=self.mesh.device_type)
        distributed.all_reduce(said, distributed.ReduceOp.MIN, self.model_group)
        return bool(said)

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Gradients become the mean over the processes that have other batches, a dtype at a time."""
        if self.data_size > 1:
            _together(gradients, self._data_group, 1.0 / self.data_size)

    def add(self, gradients: Iterable[Tensor], group: Any) -> None:
        """Gradients become the sum over a group."""
        _together(gradients, group, 1.0)


def _together(tensors: Iterable[Tensor], group: Any, factor: float) -> None:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for some in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in some])
        distributed.all_reduce(flat, group=group)
        if factor != 1.0:
            flat *= factor
        for tensor, part in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(part.view_as(tensor))


def check_group(size: int, rank: int) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise StateError(
            f"the option distributed.world_size is {size}: call torch.distributed.init_process_group before"
        )
    found = distributed.get_world_size(), distributed.get_rank()
    if (size, rank) != found:
        raise ArgumentError(
            f"the options distributed.world_size and world_rank are {size} and {rank}, "
            f"the process group has {found[0]} and {found[1]}"
        )
