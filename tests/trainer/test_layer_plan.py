"""Linear layers that could be cut among processes are found by what a model calls (tests/distributed cuts them)."""

import torch
from torch import nn

from ortmodule.trainer.layer_plan import Pair, pairs_of


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Model(nn.Module):
    """Layers whose first products read one tensor, and a head with the table's weight."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(20, 8), nn.ModuleList(Gated() for _ in range(2))
        self.between, self.head = nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(torch.tanh(self.between(x)))


def pairs(model, *inputs):
    return pairs_of(model, lambda: model(*inputs))


def test_pairs():
    found = pairs(Model(), torch.zeros(2, 3, dtype=torch.long))
    assert found == [Pair((f"layers.{i}.gate", f"layers.{i}.up"), f"layers.{i}.down") for i in range(2)]
    assert {pair.kind for pair in found} == {"layers.*.gate layers.*.up layers.*.down"}


def test_what_is_no_pair():
    one = nn.Linear(8, 8)
    twice = nn.Sequential(one, nn.ReLU(), one, nn.ReLU(), nn.Linear(8, 8))
    own = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    own[1].forward = lambda x: x  # a script's
    for model in (twice, own, nn.Sequential(nn.Linear(8, 4), nn.Flatten(), nn.Linear(12, 8)), nn.Linear(8, 8)):
        assert pairs(model, torch.zeros(2, 3, 8)) == [], model
    attention = nn.MultiheadAttention(8, 2)  # it calls no layer
    x = torch.zeros(2, 3, 8)
    assert pairs(attention, x, x, x) == []


def test_hooks_are_gone():
    model = Model()
    pairs(model, torch.zeros(2, 3, dtype=torch.long))
    assert not any(module._forward_pre_hooks for module in model.modules())
