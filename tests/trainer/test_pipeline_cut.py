"""Stages of a pipeline, one after the other in one process, compute what the module does."""

import pytest
import torch
from torch import nn

from ortmodule.trainer.pipeline_cut import CutGraph, even_starts


class Block(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.dropout, self.act = nn.LayerNorm(8), nn.Dropout(dropout), nn.ReLU(inplace=True)

    def forward(self, x, mask):
        return self.norm(x + self.dropout(self.down(self.act(self.up(x)))) * mask)


class Chain(nn.Module):
    """Tokens through blocks, all of which need a mask; the first and the last layer have one weight."""

    def __init__(self, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(20, 8), nn.ModuleList(Block() for _ in range(count))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, *inputs):
        ids, keep = inputs
        x, mask = self.table(ids), keep[..., None].float()
        skipped = x
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm((x + skipped).transpose(1, 2)).transpose(1, 2))
        return logits.square().mean(), logits


class AtTheCut(nn.Module):
    """A layer that writes in place is given what an earlier stage has made."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, *inputs):
        return (self.layers(inputs[0]),)


def batch(rows=3, length=5):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(20, (rows, length), generator=generator), torch.ones(rows, length, dtype=torch.long)


def _both(module, cut, inputs):
    """Results, gradients and buffers of the module and of its stages."""
    kept = []
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for run in (lambda: module(*inputs), lambda: cut.run(inputs)[-1]):
        torch.manual_seed(3)
        module.zero_grad()
        results = run()
        sum(r.sum() for r in results).backward()
        buffers = dict(module.named_buffers())
        kept.append([*results, *(p.grad for p in module.parameters()), *(b.clone() for b in buffers.values())])
        for name, value in start.items():
            buffers[name].copy_(value)
    return kept


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("starts", [["blocks.2"], ["blocks.1", "blocks.2", "norm"], ["blocks.1.norm"], ["head"]])
def test_stages(starts, training):
    """With dropout, a mask and a result that all stages pass on, a weight of two, and running statistics."""
    module = Chain().train(training)
    cut = CutGraph(module, batch(), [(0, 1), (0, 1)], starts)
    assert len(cut.stages) == len(starts) + 1
    for inputs in (batch(), batch(4, 7)):
        assert cut.fits(inputs)
        torch.testing.assert_close(*_both(module, cut, inputs))


def test_what_is_sent():
    """Tensors with a gradient alone: each stage makes the mask for itself."""
    module = Chain().eval()
    cut = CutGraph(module, batch(), [(0, 1), (0, 1)], ["blocks.1", "blocks.3"])
    first, second, last = cut.stages
    assert len(first.sent) == len(second.sent) == 2 and first.sent[0] in second.sent  # the skipped result goes on
    assert second.received == first.sent and last.received == second.sent and not last.sent
    owners = [{id(p) for p in cut.owners(k).values()} for k in range(3)]
    assert id(module.blocks[2].up.weight) in owners[1] and id(module.blocks[2].up.weight) not in owners[0] | owners[2]
    assert id(module.table.weight) in owners[0] & owners[2]


def test_writes_in_place_at_a_cut():
    module = AtTheCut()
    cut = CutGraph(module, (torch.randn(2, 8),), [(0,)], ["layers.1"])
    x = torch.randn(3, 8)
    torch.testing.assert_close(*_both(module, cut, (x,)))
    received = cut.stages[0].module(x)[0].detach().requires_grad_()  # as a pipeline hands it over
    cut.stages[1].module(received)[0].sum().backward()
    assert received.grad is not None


def test_fits():
    cut = CutGraph(Chain().eval(), batch(), [(0,), (0,)], ["blocks.2"])
    assert cut.fits(batch(7, 5)) and not cut.fits(batch(3, 6))  # the length was not said to change
    ids, keep = batch()
    assert not cut.fits((ids, keep.float()))


class Chosen(nn.Module):
    """What is needed behind the cut is a number of each row that depends on weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *inputs):
        x = self.first(inputs[0])
        best = x.argmax(-1)
        return (self.second(x).gather(1, best[:, None]),)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *inputs):
        x = self.first(inputs[0])
        return (self.second(x) if x.sum() > 0 else x,)


@pytest.mark.parametrize(
    "module, starts, text",
    [
        (AtTheCut(), ["layers.2", "layers.0"], "names layers.0, and forward does not come to it behind layers.2"),
        (Chosen(), ["second"], r"needed behind the cut, which has no gradient and depends on weights"),
        (Branching(), ["second"], "torch.export cannot export the model"),
    ],
)
def test_refusals(module, starts, text):
    with pytest.raises(ValueError, match=text):
        CutGraph(module, (torch.randn(2, 8),), [(0,)], starts)


def test_even_starts():
    assert even_starts(Chain(4), 2) == ["blocks.2"] and even_starts(Chain(5), 3) == ["blocks.2", "blocks.3"]
    with pytest.raises(ValueError, match="no ModuleList or Sequential of 5 layers"):
        even_starts(Chain(4), 5)
