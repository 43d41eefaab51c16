"""AdaSum against its formula, and as a hook of DDP in two processes around a wrapped module."""

import types

import pytest
import torch

from ortmodule.optim import adasum, adasum_hook
from tests.workers import texts_of_two

WORKER = """
import datetime, os, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from ortmodule import ORTModule, explain
from ortmodule.optim import adasum_hook

rank, file = int(sys.argv[1]), sys.argv[2]
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, dtype=torch.float32))

def loss_of(model, rank):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    return model(x).pow(2).mean()

ours = ORTModule(net())
ddp = nn.parallel.DistributedDataParallel(ours)
ddp.register_comm_hook(None, adasum_hook)
loss_of(ddp, rank).backward()
each = []
for other in range(2):
    model = net()
    loss_of(model, other).backward()
    each.append([p.grad for p in model.parameters()])
for p, a, b in zip(ours.parameters(), *each, strict=True):
    dot = (a * b).sum()
    torch.testing.assert_close(p.grad, (1 - dot / (2 * a.norm() ** 2)) * a + (1 - dot / (2 * b.norm() ** 2)) * b)
bits = [torch.empty_like(p) for p in ours.parameters()]
for p, other in zip(ours.parameters(), bits, strict=True):
    other.copy_(p.grad)
    dist.broadcast(other, 0)
    assert torch.equal(p.grad, other)
print("same, captured" if explain(ours).captured else explain(ours).fallback, flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may outlive the group
"""


def test_two_processes(tmp_path):
    texts = texts_of_two(WORKER, tmp_path)
    assert all("same, captured" in text for text in texts), texts


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_combine(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(40, generator=generator).to(dtype) for _ in range(2))
    found = adasum.combine(a, b)
    assert torch.equal(found, adasum.combine(b, a)) and found.dtype == dtype
    x, y = a.double(), b.double()
    expected = (1 - x @ y / (2 * x @ x)) * x + (1 - x @ y / (2 * y @ y)) * y
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(adasum.combine(a, a), a)  # what agrees is averaged
    zero = torch.zeros_like(a)
    assert torch.equal(adasum.combine(a, zero), a) and torch.equal(adasum.combine(zero, zero), zero)
    right, up = torch.tensor([3.0, 0.0], dtype=dtype), torch.tensor([0.0, 2.0], dtype=dtype)
    assert adasum.combine(right, up).tolist() == [3.0, 2.0]  # what is independent is added


def test_three_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3)
    with pytest.raises(ValueError, match="2, 4, 8, ... processes, not of 3"):
        adasum_hook(object(), types.SimpleNamespace())
