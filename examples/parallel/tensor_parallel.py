"""Trains a language model whose layers' matrices are split among processes, on a mesh of one or two axes.

    python -m examples.parallel.tensor_parallel                          two processes of this machine, over gloo
    python -m examples.parallel.tensor_parallel --sequence               tokens are split, too, between the products
    python -m examples.parallel.tensor_parallel --processes 4 --data 2   2 x 2: FSDP2 over the other axis
    torchrun --nproc-per-node 8 -m examples.parallel.tensor_parallel --data 2

Queries, keys, values and the wider product are split by columns, what follows them by rows. What the layers communicate
are nodes of the engine's graph.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from examples.parallel import shared

COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
ROWS = ("attention.out", "down")


def layer_plan(sequence):
    if not sequence:
        return {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    tokens, whole = Shard(1), Replicate()
    return {
        **{name: SequenceParallel() for name in ("before", "between")},
        "attention": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole),
        **{name: ColwiseParallel() for name in COLUMNS if name != "up"},
        "up": ColwiseParallel(input_layouts=tokens),
        **{name: RowwiseParallel(output_layouts=tokens, use_local_output=False) for name in ROWS},
    }


def parallelized(model, mesh, sequence):
    for layer in model.layers:
        parallelize_module(layer, mesh, layer_plan(sequence))
    if sequence:
        split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False)
        gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
        parallelize_module(model, mesh, {"embedding": split, "head": gathered})
    return model


def train(args, place):
    torch.manual_seed(0)
    shape = (args.data, place.ranks // args.data)
    mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=("data", "tensor"))
    model = parallelized(shared.Model(args).to(place.device), mesh["tensor"], args.sequence)
    if args.data > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    module = shared.wrapped(model, args)
    optimizer = shared.optimizer_of(module, args)

    def step_of(ids, labels):
        loss = module(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batches = shared.Batches(args, place.device, mesh["data"].get_local_rank(), args.data)
    return shared.learn(args, batches, step_of) | shared.engine_of(module)


def arguments(parser):
    parser.add_argument(
        "--data", type=int, default=1, help="processes along the axis that shards layers and has other rows"
    )
    parser.add_argument("--sequence", action="store_true", help="sequence parallelism")


if __name__ == "__main__":
    shared.main("examples.parallel.tensor_parallel", __doc__, train, arguments)
