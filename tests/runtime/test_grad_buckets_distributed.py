"""DistributedDataParallel around the wrapped module: its buckets are reduced while backward goes on."""

from tests.workers import texts_of_two

WORKER = """
import copy, datetime, os, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from ortmodule import ORTModule, explain
from ortmodule.engine import memory_goal
from ortmodule.runtime import grad_buckets

rank, file = int(sys.argv[1]), sys.argv[2]
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
memory_goal.SEGMENT_BYTES = 1000

class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(12)])
        self.unused = nn.Linear(2, 2)
        self.unused.requires_grad_(kind == "unused")

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

ran, reduced = [], []
real = grad_buckets.Backward.run
grad_buckets.Backward.run = lambda self, *args: (ran.append(1), real(self, *args))[1]

def watched(state, bucket):  # as DDP's own, and notes when it is called
    reduced.append(len(ran))
    return allreduce_hook(None, bucket)

for kind in ("plain", "unused", "static", "views"):
    torch.manual_seed(0)
    eager, results = Net(kind), []
    for wrap in (True, False):
        model = inner = ORTModule(copy.deepcopy(eager)) if wrap else copy.deepcopy(eager)
        model = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=0.003, find_unused_parameters=kind == "unused", static_graph=kind == "static",
            gradient_as_bucket_view=kind == "views")
        model.register_comm_hook(None, watched)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for step in range(4):
            x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            if kind == "plain" and step == 2:
                with model.no_sync():
                    model(x.neg()).pow(2).mean().backward()
            ran.clear(), reduced.clear()
            loss = model(x).pow(2).mean()
            loss.backward()
            if wrap and step == 3:
                early = len(ran) > 6 and reduced[0] < len(ran) / 2 and len(set(reduced)) > 2
                print(kind, "overlaps" if early else f"waits: {len(ran)} segments, reductions at {reduced}",
                      "captured" if explain(inner).captured else explain(inner).fallback, flush=True)
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        results.append(values + [p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results)
    print(kind, "same", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the group: their destructors would abort the process
"""


def test_distributed_data_parallel(tmp_path):
    """Two processes: the first bucket is reduced before half of backward's segments have run; the results are those of
    PyTorch's own module."""
    for text in texts_of_two(WORKER, tmp_path):
        for kind in ("plain", "unused", "static", "views"):
            assert f"{kind} overlaps captured" in text and f"{kind} same" in text, text
