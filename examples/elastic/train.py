"""Trains a small language model that FSDP2 shards, and goes on from its last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 -m examples.elastic.train --folder checkpoints --steps 200
    torchrun --nproc-per-node 4 -m examples.elastic.train --folder checkpoints --steps 400

Every step takes the same batch for all processes together, however many there are, so that the loss goes on as well.
With --kill-at the last process ends itself at that step, once: torchrun names it, ends the others and starts all again.
"""

import argparse
import datetime
import os
import shutil
import signal
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ortmodule import ORTModule
from ortmodule.optim import AdamWMode, FusedAdam

WORDS, ROWS = 64, 8


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Guesses the next word of a row from the mean of those before it."""

    def __init__(self, width=32, layers=2):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids, labels):
        x = self.table(ids).cumsum(1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(step, rank, ranks):
    """This rank's rows of the step's: each counts up from a random word."""
    start = torch.randint(0, WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    words = (start + torch.arange(9)) % WORDS
    return words[rank::ranks, :-1], words[rank::ranks, 1:]


def state_of(model, optimizer):
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def save(folder, step, model, optimizer):
    """A whole checkpoint or none: it gets its name when all processes have written their parts."""
    part = folder / "part"
    checkpoint.save(state_of(model, optimizer), checkpoint_id=part)
    distributed.barrier()
    if distributed.get_rank() == 0:
        part.rename(folder / f"step-{step}")
        for old in sorted(folder.glob("step-*"), key=step_of)[:-2]:
            shutil.rmtree(old)
    distributed.barrier()


def step_of(path):
    return int(path.name.removeprefix("step-"))


def load(folder, model, optimizer):
    """The steps that are done."""
    found = max(folder.glob("step-*"), key=step_of, default=None)
    if distributed.get_rank() == 0:
        shutil.rmtree(folder / "part", ignore_errors=True)
    distributed.barrier()
    if found is None:
        return 0
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=found)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return step_of(found)


def meet(limit):
    """Makes the process group. Returns (rank, number of processes)."""
    store, rank, ranks = next(distributed.rendezvous("env://", timeout=limit))
    # torchrun's store still has the addresses of the processes of earlier attempts: each has names of its own.
    store = distributed.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    return rank, ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--kill-at", type=int, help="the step at which the last process ends itself")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a collective, and for processes to meet")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rank, ranks = meet(datetime.timedelta(seconds=args.limit))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model, mesh = Model().to(device), init_device_mesh(device, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    model = ORTModule(fully_shard(model, mesh=mesh))
    optimizer = FusedAdam(model.parameters(), lr=1e-2, adam_w_mode=AdamWMode.ADAMW_TORCH)
    first = load(args.folder, model, optimizer)
    for step in range(first, args.steps):
        if step == args.kill_at and rank == ranks - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(*(t.to(device) for t in batch(step, rank, ranks)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(loss := loss.detach() / ranks)
        if rank == 0:
            print(f"step {step} of {ranks} processes, from {first}: loss {loss.item():.5f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.folder, step + 1, model, optimizer)
    os._exit(0)  # gloo's threads may outlive their group


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    main()
