"""Optimizers on shards, in two processes: FSDP2 (DTensor) and ZeroRedundancyOptimizer, as with PyTorch's own."""

from tests.workers import texts_of_two

WORKER = """
import copy, datetime, os, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from ortmodule.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedSGD

rank, file = int(sys.argv[1]), sys.argv[2]
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2,))
SETTINGS = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}

def net(shard):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return fully_shard(model, mesh=mesh) if shard else nn.parallel.DistributedDataParallel(model)

def train(model, optimizer, first, last, clip=None):
    norms = []
    for i in range(first, last):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * i + rank))
        model(x).pow(2).mean().backward()
        if clip is not None:
            norms.append(clip(model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return norms

def whole(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

def adam(parameters, ours):
    return FusedAdam(parameters, adam_w_mode=2, **SETTINGS) if ours else torch.optim.AdamW(parameters, **SETTINGS)

trained, states = {}, {}
for ours in (True, False):
    model = net(True)
    optimizer = adam(model.parameters(), ours)
    norms = train(model, optimizer, 0, 6, clip=lambda m, o: float(o.clip_grad_norm(0.1)) if ours else
                  float(nn.utils.clip_grad_norm_(m.parameters(), 0.1).full_tensor()))
    states[ours] = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    trained[ours] = model, optimizer, torch.tensor(norms), copy.deepcopy(model.state_dict())
torch.testing.assert_close(whole(trained[True][0]), whole(trained[False][0]), rtol=1e-6, atol=1e-7)
torch.testing.assert_close(trained[True][2], trained[False][2])
for ours in (True, False):  # each goes on from the other's checkpoint
    model, optimizer, _, weights = trained[not ours]
    train(model, optimizer, 6, 9)
    resumed = net(True)
    resumed.load_state_dict(weights)
    again = adam(resumed.parameters(), ours)
    set_optimizer_state_dict(resumed, again, states[not ours])
    train(resumed, again, 6, 9)
    torch.testing.assert_close(whole(resumed), whole(model), rtol=1e-6, atol=1e-7)

for ours, theirs in ((FusedSGD, torch.optim.SGD), (FusedAdagrad, torch.optim.Adagrad)):
    found = []
    for make in (ours, theirs):
        model = net(True)
        train(model, make(model.parameters(), lr=0.1), 0, 5)
        found.append(whole(model))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
try:
    FusedLamb(net(True).parameters())
    raise SystemExit("shards were taken")
except ValueError as error:
    assert "needs whole parameters" in str(error)

found = []
for make, settings in ((FusedAdam, {"adam_w_mode": 2}), (torch.optim.AdamW, {})):
    model = net(False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **SETTINGS, **settings)
    train(model, optimizer, 0, 5)
    found.append(whole(model))
torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
print("as PyTorch's", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may outlive the group
"""


def test_two_processes(tmp_path):
    texts = texts_of_two(WORKER, tmp_path)
    assert all("as PyTorch's" in text for text in texts), texts
