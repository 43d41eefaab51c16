"""What hooks keep before, in and behind breaks of a graph has PyTorch's gradients, in modules made by chance."""

import copy
import random

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if kind == "batch norm" else nn.LayerNorm(6)
        self.kind = kind

    def forward(self, x, skip=None):
        y = self.norm(self.linear(x)).tanh()
        if self.kind == "in place":
            y = (y * 2).relu_()
        return y if skip is None else y + skip


class Net(nn.Module):
    def __init__(self, chance):
        super().__init__()
        kinds = [chance.choice(("batch norm", "in place", "plain")) for _ in range(chance.randrange(2, 5))]
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.wide, self.narrow = nn.Linear(6, 64), nn.Linear(64, 6)  # most of the weights are no island's
        self.blocks = nn.ModuleList(map(Block, kinds))
        self.ways, self.two = [chance.randrange(4) for _ in kinds], chance.random() < 0.5

    def forward(self, x):
        h = before = self.first(x)
        kept = []
        for block, way in zip(self.blocks, self.ways, strict=True):
            if way == 0:
                h = h + block(h)
            elif way == 1:
                h, before = block(h, before), h
            elif way == 2:
                h = block(h) * torch.sigmoid(before.mean())
            else:
                h = block(self.narrow(self.wide(h).relu()))
            kept.append(h)
        return (self.last(h), kept[0]) if self.two else (self.last(h), None)


def changed(kept, inputs, output):
    kept.append(inputs[0] * output.mean())
    return output * 1.5


def scaled(kept, output):
    output.register_hook(lambda grad: grad * 0.5)
    kept.append(output)


HOOKS = {
    "a result": lambda m, kept: m.register_forward_hook(lambda m, i, o: kept.append(o)),
    "an input": lambda m, kept: m.register_forward_pre_hook(lambda m, i: kept.append(i[0])),
    "a loss": lambda m, kept: m.register_forward_hook(lambda m, i, o: kept.append((o * 2).square().mean())),
    "another result": lambda m, kept: m.register_forward_hook(lambda m, i, o: changed(kept, i, o)),
    "a gradient": lambda m, kept: m.register_full_backward_hook(lambda m, i, o: kept.append(o[0].detach().clone())),
    "a hook on the result": lambda m, kept: m.register_forward_hook(lambda m, i, o: scaled(kept, o)),
}


def attach(module, chance):
    kept = []
    for block in module.blocks:
        target = chance.choice((block, block.linear, block.norm))
        if chance.random() < 0.75:
            HOOKS[chance.choice(list(HOOKS))](target, kept)
    return kept


def added(y, kept, x):
    (y + kept).backward()


def alone(y, kept, x):
    (kept if isinstance(kept, torch.Tensor) else y).backward()


def after(y, kept, x):
    y.backward(retain_graph=True)
    alone(y, kept, x)


def before(y, kept, x):
    alone(y, kept, x) if not isinstance(kept, torch.Tensor) else kept.backward(retain_graph=True)
    y.backward() if isinstance(kept, torch.Tensor) else None


def penalty(y, kept, x):
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (grad.square().sum() + kept).backward()


USES = (added, alone, after, before, penalty)


def trained(module, kept, use):
    found = []
    for step in range(3):
        kept.clear()
        x = torch.randn(3 + step % 2, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        y, other = module(x.requires_grad_())
        loss = y.square().mean() + (0.0 if other is None else other.sum() * 0.3)
        carried = [t for t in kept if t.requires_grad]
        use(loss, sum(((i + 1) * t).square().mean() for i, t in enumerate(carried)), x)
        found += [y.detach(), x.grad, *(t.detach().clone() for t in kept)]
    return [*found, *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.filterwarnings("ignore")
@each("seed, use", [(seed, use) for seed in range(24) for use in USES], lambda case: case[0] % 5 == USES.index(case[1]))
def test_gradients(seed, use):
    torch.manual_seed(seed)
    results, eager = [], Net(random.Random(seed)).double()
    for wrap in (lambda module: module, ORTModule):
        module = copy.deepcopy(eager)
        kept = attach(module, random.Random(seed + 100))
        module = wrap(module)
        results.append(trained(module, kept, use))
    assert [t is None for t in results[0]] == [t is None for t in results[1]]
    pairs = [(a, b) for a, b in zip(*results, strict=True) if a is not None]
    torch.testing.assert_close([b for _, b in pairs], [a for a, _ in pairs], rtol=1e-7, atol=1e-9)
    assert explain(module).captured, explain(module).fallback
