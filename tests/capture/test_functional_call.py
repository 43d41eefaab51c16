"""Modules that forward calls with other parameters, which it computes: they are a part of the graph."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from ortmodule import ORTModule, explain


class Hyper(nn.Module):
    """Weights that another layer makes."""

    def __init__(self):
        super().__init__()
        self.makes, self.body, self.norm = nn.Linear(2, 30), nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x, c):
        weights = self.makes(c)
        made = {"weight": weights[:25].view(5, 5), "bias": weights[25:]}
        return self.norm(functional_call(self.body, made, (x,))) + self.body(x)


class Adapted(nn.Module):
    """A sum of parameters, of all layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)))
        self.added = nn.ParameterList([torch.randn_like(p) / 10 for p in self.body.parameters()])

    def forward(self, x, c):
        made = {name: p + a for (name, p), a in zip(self.body.named_parameters(), self.added, strict=True)}
        return functional_call(self.body, made, x) * c.sum()


class Mixed(nn.Module):
    """A mean of members, and a buffer that is given, too."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList([nn.BatchNorm1d(5) for _ in range(3)])

    def forward(self, x, c):
        names = [name for name, _ in self.members[0].named_parameters()]
        made = {name: torch.stack([m.get_parameter(name) for m in self.members]).mean(0) for name in names}
        made["running_mean"], made["running_var"] = torch.zeros(5), torch.ones(5)
        return functional_call(self.members[0], made, (x,)) * c.sum()


@pytest.mark.parametrize("cls", [Hyper, Adapted, Mixed])
def test_as_in_pytorch(cls):
    torch.manual_seed(0)
    theirs = cls()
    ours = ORTModule(copy.deepcopy(theirs))
    for step in range(3):
        for mode in ("train", "eval"):
            generator = torch.Generator().manual_seed(step)
            x, c = torch.randn(3 + step, 5, generator=generator), torch.randn(2, generator=generator)
            results = []
            for model in (getattr(ours, mode)(), getattr(theirs, mode)()):
                model.zero_grad()
                result = model(x, c)
                result.square().sum().backward()
                results.append([result.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert explain(ours).pytorch_calls == 0 and not explain(ours).python_ops
