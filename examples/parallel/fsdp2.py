"""Trains a language model whose weights, gradients and optimizer states are split among processes by FSDP2.

    python -m examples.parallel.fsdp2                                    two processes of this machine, over gloo
    torchrun --nproc-per-node 8 -m examples.parallel.fsdp2 --dtype bfloat16

Each layer is sharded, then the model; ORTModule wraps that. Every layer is a graph between its all-gather and its
reduce-scatter, which FSDP2 begins ahead of their turn as usual.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from examples.parallel import shared


def train(args, place):
    torch.manual_seed(0)
    model, mesh = shared.Model(args).to(place.device), init_device_mesh(place.device.type, (place.ranks,))
    policy = MixedPrecisionPolicy()
    if args.dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    module = shared.wrapped(fully_shard(model, mesh=mesh, mp_policy=policy), args)
    optimizer = shared.optimizer_of(module, args)

    def step_of(ids, labels):
        loss = module(ids, labels)
        loss.backward()
        clip_grad_norm_(module.parameters(), shared.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batches = shared.Batches(args, place.device, place.rank, place.ranks)
    return shared.learn(args, batches, step_of) | shared.engine_of(module)


def arguments(parser):
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="that layers compute in")


if __name__ == "__main__":
    shared.main("examples.parallel.fsdp2", __doc__, train, arguments)
