"""Tensor parallelism: `parallelize_module` with column- and row-wise plans, sequence parallelism, a 2-D mesh."""

import functools

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.distributed.nets import WIDTH, WORDS, batch, both, net, whole

COLUMNS = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel)
ROWS = dict.fromkeys(("out", "down"), RowwiseParallel)


def parallel(mesh):
    model = net()
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: style() for name, style in (COLUMNS | ROWS).items()})
    return model


def _train(rank, model, same):
    """Every rank of a group has the same batch."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        loss = model(*batch(step, 0 if same else rank))
        loss.backward()
        seen += [loss.detach(), *whole(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + whole(model.parameters())


def columns_and_rows(rank, folder):
    """Losses, gradients and parameters; what is between the products is in the engine."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    report = both(lambda: parallel(mesh), lambda model: _train(rank, model, True), rtol=1e-4, atol=1e-5)
    assert report.captured and not report.pytorch_calls, report
    names = {f"layers.{i}.{name}" for i in range(2) for name in COLUMNS | ROWS}
    assert set(report.breaks) == set(report.python_ops) == names, report
    return "same"


class Rows(nn.Module):
    """A norm and a residual for each part of the tokens, products for all of them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x))))).square().mean()


def sequence(rank, folder):
    """Tokens are split among the ranks but where there are products."""
    mesh = init_device_mesh("cpu", (2,))
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }

    def train(model):
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(3):
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            loss = model(x)
            loss.backward()
            seen += [loss.detach(), x.grad, *whole(p.grad for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        return seen + whole(model.parameters())

    report = both(lambda: parallelize_module(net(Rows), mesh, plan), train, rtol=1e-4, atol=1e-5)
    assert report.captured and set(report.breaks) == {"norm", "up", "down"}, report
    return "same"


def two_dimensions(rank, folder):
    """Layers that are sharded over one dimension of a mesh, and whose products are parallel over the other."""
    for shape in ((1, 2), (2, 1)) if distributed.get_world_size() == 2 else ((2, 2),):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))

        def make(mesh=mesh):
            model = parallel(mesh["tensor"])
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["data"])
            return fully_shard(model, mesh=mesh["data"])

        report = both(make, functools.partial(_train, mesh["data"].get_local_rank(), same=False), rtol=1e-4, atol=1e-5)
        assert report.captured and len(report.sharded) == 2, report
        for layer in report.sharded.values():
            assert layer.captured and set(layer.breaks) == {*COLUMNS, *ROWS}, layer
    return "same"
