"""Trains a language model whose layers are split among processes, which micro-batches pass in turn (pipelines).

    python -m examples.parallel.pipeline                                 two processes of this machine, over gloo
    python -m examples.parallel.pipeline --schedule interleaved          each has two stages
    torchrun --nproc-per-node 4 -m examples.parallel.pipeline --layers 8

Every stage is an ORTModule.
"""

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from examples.parallel import shared

SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}


def stages_of(args, count):
    """The model in ``count`` parts."""
    if args.layers < count:
        raise SystemExit(f"{args.layers} layers are too few for {count} stages")
    model = shared.Model(args)
    bounds = [round(i * args.layers / count) for i in range(count + 1)]
    parts = [list(model.layers[first:last]) for first, last in zip(bounds, bounds[1:], strict=False)]
    parts[0].insert(0, model.embedding)
    parts[-1].append(model.head)
    return [nn.Sequential(*part) for part in parts]


def train(args, place):
    torch.manual_seed(0)
    cls, each = SCHEDULES[args.schedule]
    count = each * place.ranks
    modules = {i: module for i, module in enumerate(stages_of(args, count)) if i % place.ranks == place.rank}
    wrapped = [shared.wrapped(module.to(place.device), args) for module in modules.values()]
    stages = [PipelineStage(module, i, count, place.device) for i, module in zip(modules, wrapped, strict=True)]
    schedule = cls(stages if each > 1 else stages[0], n_microbatches=args.parts, loss_fn=shared.loss_of)
    optimizer = shared.optimizer_of(nn.ModuleList(wrapped), args)
    is_first, is_last = place.rank == 0, place.rank == place.ranks - 1

    def step_of(ids, labels):
        losses = []
        schedule.step(*([ids] if is_first else []), **({"target": labels, "losses": losses} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if is_last else torch.zeros((), device=place.device)
        distributed.broadcast(mean, place.ranks - 1)
        return mean

    return shared.learn(args, shared.Batches(args, place.device), step_of) | shared.engine_of(*wrapped)


def arguments(parser):
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--parts", type=int, default=4, help="micro-batches of a batch")


if __name__ == "__main__":
    shared.main("examples.parallel.pipeline", __doc__, train, arguments)
