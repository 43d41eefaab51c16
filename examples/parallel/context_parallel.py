"""Trains a language model whose rows are split among processes by their tokens (context parallelism).

    python -m examples.parallel.context_parallel                         two processes of this machine, over gloo
    torchrun --nproc-per-node 8 -m examples.parallel.context_parallel --length 8192

Each process has a part of every row. Attention gathers the keys and values of all parts, forward, and adds their
gradients up, backward: both are nodes of the engine's graph.
"""

import torch
from torch import distributed
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from examples.parallel import shared

#: Its name until torch 2.12, and since.
gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


def train(args, place):
    if args.length % place.ranks:
        raise SystemExit(f"a row of {args.length} tokens cannot be split among {place.ranks} processes")
    torch.manual_seed(0)
    part = args.length // place.ranks

    def spread(own):
        """Of [rows, heads, part, numbers] all parts, one behind the other."""
        return gather(own, gather_dim=2, group=distributed.group.WORLD)

    model = shared.Model(args, first=place.rank * part, spread=spread).to(place.device)
    model = shared.wrapped(model, args)
    # Its reductions have a group of their own, since they and the collectives of backward come in another order here.
    module = DistributedDataParallel(model, process_group=distributed.new_group())
    optimizer = shared.optimizer_of(module, args)
    own = slice(place.rank * part, (place.rank + 1) * part)

    def step_of(ids, labels):
        loss = module(ids[:, own], labels[:, own])
        loss.backward()
        clip_grad_norm_(module.parameters(), shared.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return shared.learn(args, shared.Batches(args, place.device), step_of) | shared.engine_of(model)


if __name__ == "__main__":
    shared.main("examples.parallel.context_parallel", __doc__, train)
