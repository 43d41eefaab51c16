"""Hooks of forward on what autograd saves: those that only move it change nothing, PyTorch calls all others."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from ortmodule import ORTModule, explain

PACKED = []


def halved(tensor):
    PACKED.append(tensor.shape)
    return tensor.half()


class Offloads(saved_tensors_hooks):
    """As libraries derive one."""

    def __init__(self):
        super().__init__(lambda tensor: (PACKED.append(tensor.shape), tensor.numpy())[1], torch.from_numpy)


class Compresses(nn.Module):
    def __init__(self, hooks):
        super().__init__()
        self.first, self.second, self.hooks = nn.Linear(4, 4), nn.Linear(4, 4), hooks

    def forward(self, x):
        with self.hooks():
            return self.second(torch.tanh(self.first(x)))


HOOKS = {
    "pack": (lambda: saved_tensors_hooks(halved, lambda tensor: tensor.float()), ["1"]),
    "a class": (Offloads, ["1"]),
    "save_on_cpu": (save_on_cpu, []),
    "pinned": (lambda: save_on_cpu(pin_memory=False), []),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOOKS)
def test_as_in_pytorch(name):
    hooks, islands = HOOKS[name]
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 4), Compresses(hooks), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    ours = ORTModule(copy.deepcopy(theirs))
    for step in range(3):
        x, counts = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)), []
        for model in (ours, theirs):
            PACKED.clear()
            model(x).square().sum().backward()
            counts.append(list(PACKED))
        assert step == 0 or counts[0] == counts[1]
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)  # a half would be 1e-3 off
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))
    assert explain(ours).captured and explain(ours).python_ops == islands
