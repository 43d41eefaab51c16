"""Trains by torch.distributed.pipelining, where each stage is an ORTModule."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ortmodule import ORTModule, explain
from tests.distributed.nets import WIDTH, WORDS, Block

PARTS, ROWS = 4, 2  # micro-batches, and rows of each


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block = nn.Embedding(WORDS, WIDTH), Block()

    def forward(self, ids):
        return self.block(self.table(ids))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.block(x))


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers(count):
    torch.manual_seed(0)
    return [First(), *(Block() for _ in range(count - 2)), Last()]


def data(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, WORDS, (PARTS * ROWS, 5), generator=generator) for _ in range(2)]


def _train(rank, make, count, wrap):
    """Losses, gradients and parameters of this rank's stages after some steps; the stages' modules."""
    mine = [(i, ORTModule(m) if wrap else m) for i, m in enumerate(layers(count)) if i % 2 == rank]
    stages = [PipelineStage(module, i, count, torch.device("cpu")) for i, module in mine]
    schedule = make(stages if count > 2 else stages[0], n_microbatches=PARTS, loss_fn=loss_of)
    parameters = [p for _, module in mine for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    seen = []
    for step in range(3):
        ids, labels = data(step)
        losses = []
        options = {"target": labels, "losses": losses} if rank else {}
        schedule.step(*([] if rank else [ids]), **options)
        seen += [loss.detach() for loss in losses] + [p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach() for p in parameters], [module for _, module in mine]


def _alone(count):
    """Gradients of the first step in one process, by layer."""
    whole = layers(count)
    ids, labels = data(0)
    for some, theirs in zip(ids.split(ROWS), labels.split(ROWS), strict=True):
        (loss_of(nn.Sequential(*whole)(some), theirs) / PARTS).backward()
    return [[p.grad for p in layer.parameters()] for layer in whole]


def schedules(rank, folder):
    """Losses, gradients and parameters of every schedule, as of plain stages, and as in one process."""
    for make, count in ((ScheduleGPipe, 2), (Schedule1F1B, 2), (ScheduleInterleaved1F1B, 4)):
        (ours, modules), (theirs, _) = (_train(rank, make, count, wrap) for wrap in (True, False))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        alone = [grad for i, grads in enumerate(_alone(count)) if i % 2 == rank for grad in grads]
        first = ours[PARTS * rank :][: len(alone)]
        torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-6)
        for module in modules:
            report = explain(module)
            assert report.captured and not report.pytorch_calls, (make.__name__, report)
    return "same"
