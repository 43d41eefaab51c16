"""Operators of torch.ops called by name hold for other sizes, and their writes in place are seen."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

aten = torch.ops.aten


class Calls(nn.Module):
    """Runs ``function(self, x)``, with a table and a buffer at hand."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.table = function, nn.Parameter(torch.randn(30, 4))
        self.register_buffer("places", torch.arange(30)[None])
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return self.function(self, x)


SIZES = {
    "arange": lambda m, x: x + aten.embedding.default(m.table, aten.arange.default(x.shape[1])),
    "slice": lambda m, x: x + aten.embedding.default(m.table, aten.slice.Tensor(m.places, 1, 0, x.shape[1])),
    "slice from the end": lambda m, x: aten.slice.Tensor(x, -2, x.shape[1] - 3, 9223372036854775807),
    "expand": lambda m, x: x * aten.expand.default(m.table[:1], [x.shape[0], x.shape[1], -1]),
    "view": lambda m, x: aten.view.default(x, [x.shape[0] * x.shape[1], 4]) @ m.table.t(),
    "zeros": lambda m, x: aten.cat.default([x, aten.zeros.default([x.shape[0], x.shape[1], 2])], -1),
    "full": lambda m, x: x + aten.full.default([x.shape[1], 1], x.shape[1]),
    "div": lambda m, x: aten.div.Tensor(x, x.shape[1]),
    "mul of a size": lambda m, x: aten.mul.Tensor(x.sum(1), x.size(1) * 2),
    "select": lambda m, x: aten.select.int(x, 1, x.shape[1] - 1),
    "packet": lambda m, x: x + aten.embedding(m.table, aten.arange(x.shape[1])),
}


@pytest.mark.parametrize("name", SIZES)
def test_one_graph_for_all_sizes(name):
    module = Calls(SIZES[name])
    ours = ORTModule(module)
    for rows, length in ((3, 5), (2, 9), (4, 7)):
        x = torch.randn(rows, length, 4)
        found, expected = [], []
        for run, kept in ((ours, found), (module, expected)):
            given = x.clone().requires_grad_()
            result = run(given)
            result.square().sum().backward()
            kept += [result.detach(), given.grad, module.table.grad]
            module.zero_grad()
        torch.testing.assert_close(found, expected)
    report = explain(ours)
    assert report.captured and not report.pytorch_calls and report.exports == 1, report


WRITES = {
    "of an overload": lambda m, x: x + aten.add_.Tensor(m.seen, 1.0),
    "of a packet": lambda m, x: x + aten.add_(m.seen, 1.0),
    "with a copy": lambda m, x: (aten.copy_.default(m.seen, x.detach().mean((0, 1))), x * m.seen)[1],
    "of a result": lambda m, x: aten.relu_.default(x * 2.0) + x,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    plain, ours = Calls(WRITES[name]), ORTModule(Calls(WRITES[name]))
    for length in (5, 9):
        x = torch.randn(3, length, 4)
        torch.testing.assert_close(ours(x), plain(x))
        torch.testing.assert_close(ours.seen, plain.seen)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.place = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.first, self.second, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, ids):
        x = self.table(ids) + self.place(torch.arange(ids.shape[1]))
        return self.norm(x + self.second(torch.relu(self.first(x))))


def test_a_graph_of_torch_export():
    """As `torch.export` gives it, it trains in the engine at any length."""
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    exported = torch.export.export(Encoder(), (torch.zeros(3, 5, dtype=torch.long),), dynamic_shapes=sizes)
    module, plain = exported.module(), Encoder()
    ours = ORTModule(module)
    for rows, length in ((2, 6), (3, 9)):
        ids = torch.randint(20, (rows, length))
        torch.testing.assert_close(ours(ids), plain(ids))
        ours(ids).square().mean().backward()
        plain(ids).square().mean().backward()
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert explain(ours).captured and explain(ours).exports == 1
