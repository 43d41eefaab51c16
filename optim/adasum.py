"""Combines gradients by AdaSum (Maleki et al., 2021): added where they differ, averaged where they agree."""

# DistributedDataParallel compares the annotations of a hook: they are no strings here.
from typing import Any

import torch
from torch import distributed
from torch.futures import Future

from ortmodule.core.errors import ArgumentError


def adasum_hook(
    process_group: Any,
    bucket: distributed.GradBucket,  # type: ignore[name-defined]  # torch's stubs lack it
) -> Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: ``ddp.register_comm_hook(None, adasum_hook)``.

    Gradients a and b of one parameter become (1 - ab / 2aa) a + (1 - ab / 2bb) b; more than two processes do so in
    pairs, then pairs of pairs. ``process_group``: the group to combine over, or None for all processes.

    Raises ValueError unless the number of processes is a power of two.
    """
    group: Any = process_group if process_group is not None else distributed.group.WORLD
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    if world & (world - 1):
        raise ArgumentError(f"AdaSum combines the gradients of 2, 4, 8, ... processes, not of {world}")
    mine = bucket.buffer()
    sizes = [g.numel() for g in bucket.gradients()]
    distance = 1
    while distance < world:
        theirs = torch.empty_like(mine)
        partner = distributed.get_global_rank(group, rank ^ distance)
        exchange = [
            distributed.P2POp(distributed.isend, mine, partner, group),
            distributed.P2POp(distributed.irecv, theirs, partner, group),
        ]
        for work in distributed.batch_isend_irecv(exchange):
            work.wait()
        mine = torch.cat([combine(a, b) for a, b in zip(mine.split(sizes), theirs.split(sizes), strict=True)])
        distance *= 2
    future: Future[torch.Tensor] = Future()
    future.set_result(mine)
    return future


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The adaptive sum of two gradients of one parameter; the same bits whichever comes first."""
    x, y = a.float() if a.dtype.itemsize < 4 else a, b.float() if b.dtype.itemsize < 4 else b
    dot, xx, yy = (x * y).sum(), x.square().sum(), y.square().sum()
    of_x = torch.where(xx > 0, 1 - dot / (2 * xx), torch.ones_like(xx))
    of_y = torch.where(yy > 0, 1 - dot / (2 * yy), torch.ones_like(yy))
    return (of_x * x + of_y * y).to(a.dtype)
