"""Trains with ORTModule first, then DistributedDataParallel or FSDP2 around it."""

import contextlib

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ortmodule import ORTModule, explain
from ortmodule.engine import memory_goal
from tests.distributed.nets import batch, net, whole


def _mlp():
    torch.manual_seed(0)
    # One matrix that PowerSGD makes smaller: several get its random numbers in the order of their gradients.
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))


def _compressed(state, bucket):
    # By its own name DistributedDataParallel takes it over NCCL alone.
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)


def _train(model, rank, steps=4):
    """Losses, parameters and buffers."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        loss = (
            model(torch.randn(3 + step % 2, 4, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen + whole(model.parameters()) + [b.clone() for b in model.buffers()]


def data_parallel(rank, folder):
    """A batch norm, and hooks of communication: bfloat16, PowerSGD."""
    for name in ("none", "bf16", "power"):
        found = []
        for wrap in (False, True):
            inner = ORTModule(_mlp()) if wrap else _mlp()
            model = DistributedDataParallel(inner)
            if name == "bf16":
                model.register_comm_hook(None, _compressed)
            elif name == "power":
                state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            found.append(_train(model, rank))
        # What is rounded to bfloat16 may fall to the other side.
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if name == "bf16" else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found[1], found[0], **tolerance)
        assert explain(inner).captured, explain(inner).fallback
    return "same"


def without_communication(rank, folder):
    """Backward in `no_sync` adds up gradients, and the next one reduces their sum, as without ORTModule."""
    group, found, counts = distributed.group.WORLD, [], []
    for wrap in (False, True):
        model = DistributedDataParallel(ORTModule(_mlp()) if wrap else _mlp(), broadcast_buffers=False)
        for step in range(4):
            with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = model(x).pow(2).mean()
                before = group._get_sequence_number_for_group()
                loss.backward()
            counts.append(group._get_sequence_number_for_group() - before)
            found.append([p.grad.clone() for p in model.parameters()])
            if step % 2:
                model.zero_grad()
    torch.testing.assert_close(found[4:], found[:4])
    assert counts[4:] == counts[:4] and [bool(count) for count in counts[:4]] == [False, True] * 2, counts
    return "same"


def overlap(rank, folder):
    """In a trace the first bucket is reduced before the last part of backward begins."""
    before, memory_goal.SEGMENT_BYTES = memory_goal.SEGMENT_BYTES, 1000
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)))
        model = DistributedDataParallel(ORTModule(model), bucket_cap_mb=0.003)
        for step in range(4):
            loss = model(torch.ones(3, 16) * (step + rank)).pow(2).mean()
            if step < 3:
                loss.backward()
        with profile(activities=[ProfilerActivity.CPU]) as found:
            loss.backward()
    finally:
        memory_goal.SEGMENT_BYTES = before
    events = [(event.time_range.start, event.name) for event in found.events()]
    reductions = sorted(start for start, name in events if "allreduce" in name)
    parts = sorted(start for start, name in events if name == "LaterNodeBackward")
    assert reductions and len(parts) > 2 and reductions[0] < parts[-1], sorted(events)
    return "same"


def layers_first(rank, folder):
    """Each layer is wrapped, then sharded; the whole module is wrapped, then sharded."""
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("layers", "whole"):
        found = []
        for wrap in (False, True):
            model = net()
            if kind == "layers":
                for i, layer in enumerate(model.layers):
                    model.layers[i] = fully_shard(ORTModule(layer) if wrap else layer, mesh=mesh)
            elif wrap:
                model = ORTModule(model)
            model = fully_shard(model, mesh=mesh)
            optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
            for step in range(3):
                loss = model(*batch(step, rank))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.detach())
            found.append(seen + whole(model.parameters()))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        wrapped = model.layers[0] if kind == "layers" else model
        assert explain(wrapped).captured, explain(wrapped).fallback
    return "same"
