"""Of a model that was trained and let go no object is left, and no byte that the engine counts."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, _core
from ortmodule.engine.session import Session
from ortmodule.runtime.compiled_graph import CompiledGraph


class Dropped(nn.Module):
    """A Transformer layer with dropout; its arena takes more than a megabyte, which the engine counts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().mean()


def counted():
    gc.collect()
    return _core.memory()["used"], len(_core.objects((CompiledGraph, Session)))


def train(config, autocast):
    """Of a training, which ends with this call: weak references to what it made, one of its plans, which knows no such
    references, the most bytes that it had, and how many were offloaded."""
    _core.memory_most()
    module = Dropped().train()
    model = ORTModule(module, config=config)
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (16, 24, 16):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.randn(rows, 32, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    graph = model._ortmodule.latest
    plan = next(reversed(graph.session.plans.values()))
    offloaded = max(p.offload_bytes for p in graph.session.plans.values())
    found = [module, model, model._ortmodule, *module.parameters(), *module.buffers(), graph, graph.session]
    return [(type(each).__name__, weakref.ref(each)) for each in found], plan, _core.memory_most(), offloaded


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", ["usual", "offload"])
def test_nothing_is_left_of_a_training(way, autocast, tmp_path):
    config = Config(memory_offload=True, memory_offload_path=str(tmp_path)) if way == "offload" else Config()
    torch.manual_seed(0)
    before = counted()
    references, plan, most, offloaded = train(config, autocast)
    assert most > before[0], "nothing of it was counted"
    assert bool(offloaded) == (way == "offload")
    assert counted() == before
    assert not [name for name, reference in references if reference() is not None]
    assert sys.getrefcount(plan) == 2, "this function has it, and the call that counts"
    assert not list(tmp_path.iterdir())
