"""What public code says in forward is in the engine: one graph for all sizes, no island, PyTorch's results.

Tests of results alone pass where PyTorch runs a module, too. Here that is a failure, for each of some 150 idioms.
"""

import copy
import inspect
import types

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.capture.idioms import attention, modules, tensors
from tests.twins import rows, same

IDIOMS = {
    name: function
    for subject in (attention, modules, tensors)
    for name, function in vars(subject).items()
    if inspect.isfunction(function) and function.__module__ == subject.__name__
}


class Model(nn.Module):
    """What idioms find: layers of width 8, and some of everything else that a module has."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.qkv, self.emb = nn.Linear(8, 24), nn.Embedding(16, 8)
        self.cls, self.w = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.rand(8) + 0.5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.seq = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.table = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.conv, self.mha = nn.Conv1d(8, 8, 3, padding=1), nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru, self.lstm = nn.GRU(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)))
        self.register_buffer("ids", torch.arange(16)[None])
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table_buffer", torch.linspace(0.1, 1, 8))
        self.steps, self.debug, self.cfg = 0, False, types.SimpleNamespace(use=True)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    parts = value if isinstance(value, (list, tuple)) else parts
    return [t for each in parts for t in tensors_in(each)]


@pytest.mark.parametrize("name", IDIOMS)
def test_in_the_engine(name):
    torch.manual_seed(0)
    eager = type("Idiom", (Model,), {"forward": IDIOMS[name]})()
    ours, sizes = ORTModule(copy.deepcopy(eager)), ((3, 5), (2, 7), (3, 5), (4, 9))
    for seed, size in enumerate(sizes):
        found = []
        for module in (ours, eager):
            module.zero_grad()
            x = rows(*size, 8, seed=seed).requires_grad_()
            result = module(x)
            loss = sum(t.float().square().mean() for t in tensors_in(result) if t.requires_grad)
            loss.backward()
            grads = [g if g is not None else torch.zeros(1) for g in (x.grad, *(p.grad for p in module.parameters()))]
            found.append((result, grads, [*module.buffers()]))
        same(*found, rtol=1e-3, atol=2e-5)
    report = explain(ours)
    assert report.captured, report.fallback
    assert not (report.aten_ops or report.python_ops or report.breaks or report.parts), str(report)
    assert (report.exports, report.engine_calls, report.pytorch_calls) == (1, len(sizes), 0), str(report)
