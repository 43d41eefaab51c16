"""Trains a language model on several processes by DistributedDataParallel: each has its own rows.

    python -m examples.parallel.ddp                                      two processes of this machine, over gloo
    python -m examples.parallel.ddp --accumulate 4 --hook bf16
    torchrun --nproc-per-node 8 -m examples.parallel.ddp                 the same with GPUs, over NCCL

Gradients are reduced while backward goes on; with --accumulate only behind the last part of a batch (`no_sync`).
"""

import contextlib

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from examples.parallel import shared


def in_bfloat16(group, bucket):
    """default_hooks.bf16_compress_hook, which PyTorch itself takes for GPUs alone."""
    return default_hooks.bf16_compress_hook(group, bucket)


def add_hook(module, name):
    """Communicates less: gradients rounded to bfloat16, or as products of two narrow matrices."""
    if name == "bf16":
        module.register_comm_hook(None, in_bfloat16)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=4)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def train(args, place):
    torch.manual_seed(0)
    model = shared.wrapped(shared.Model(args).to(place.device), args)
    module = DistributedDataParallel(
        model, static_graph=args.static_graph, find_unused_parameters=args.find_unused_parameters
    )
    add_hook(module, args.hook)
    optimizer = shared.optimizer_of(module, args)

    def step_of(ids, labels):
        total, parts = 0.0, list(zip(ids.chunk(args.accumulate), labels.chunk(args.accumulate), strict=True))
        for i, part in enumerate(parts):
            with module.no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
                loss = module(*part) / len(parts)
                loss.backward()
            total += loss.detach()
        clip_grad_norm_(module.parameters(), shared.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    batches = shared.Batches(args, place.device, place.rank, place.ranks)
    return shared.learn(args, batches, step_of) | shared.engine_of(model)


def arguments(parser):
    parser.add_argument("--accumulate", type=int, default=1, help="parts of a batch, each with a backward")
    parser.add_argument("--hook", choices=("none", "bf16", "powersgd"), default="none")
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--find-unused-parameters", action="store_true")


if __name__ == "__main__":
    shared.main("examples.parallel.ddp", __doc__, train, arguments)
