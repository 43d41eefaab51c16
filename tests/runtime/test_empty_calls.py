"""PyTorch runs a call with an empty input, and that call alone."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

MODULES = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()), (4,)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (4, 8, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (3, 4)),
    "lstm": (lambda: nn.LSTM(4, 4, batch_first=True), (3, 4)),
}


@each("sizes", ([4, 0, 3, 0, 5], [0, 4, 0, 3]), ([4, 0, 3, 0, 5],))
@each("name", MODULES, ("linear",))
def test_one_graph_beside_empty_batches(name, sizes):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    eager = make()
    ours = ORTModule(copy.deepcopy(eager))
    for rows in sizes:
        found = []
        for model in (eager, ours):
            x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows)).requires_grad_()
            model.zero_grad()
            y = model(x)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
            found.append((y.detach(), x.grad, [p.grad for p in model.parameters()]))
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        report = explain(ours)
        assert report.captured == (rows > 0), report.fallback
    assert report.exports == 1


def test_what_is_said_is_of_the_call():
    model = ORTModule(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="PyTorch runs such a call, not the engine: an input is empty"):
        model(torch.ones(0, 4))
