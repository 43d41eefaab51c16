"""A piece between submodules that PyTorch runs is planned early, and PyTorch takes over what the engine refuses."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 4


class Rows(nn.Module):
    """Keeps what it returns, so that it is a break; chooses rows by their sums."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.a, self.b, self.kept, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), None, nn.Dropout(drop)
        self.choose = nn.Tanh()
        self.choose.register_forward_hook(self.keep)

    def keep(self, module, given, result):
        self.kept = result[result.detach().sum(1) > self.least]
        return self.kept

    least = -100.0

    def forward(self, x):
        return self.drop(self.b(self.choose(self.a(x)).tanh())).exp()


def step(module, least):
    inner = module.module if isinstance(module, ORTModule) else module
    inner.least = least
    for p in module.parameters():
        p.grad = None
    torch.manual_seed(1)
    y = module(torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH))
    (y.sum() + inner.kept.square().sum()).backward()
    return [y.detach(), *(p.grad for p in module.parameters())]


def test_an_empty_tensor_of_a_submodule_goes_on_in_pytorch():
    torch.manual_seed(0)
    eager = Rows()
    ours = ORTModule(copy.deepcopy(eager))
    for least in (-100.0, 100.0, -100.0):
        torch.testing.assert_close(step(ours, least), step(eager, least))
    assert explain(ours).captured and explain(ours).breaks


def test_what_draws_cannot_go_on_in_pytorch():
    torch.manual_seed(0)
    ours = ORTModule(Rows(0.5))
    step(ours, -100.0)
    with pytest.raises(StateError, match="It has run a submodule already"):
        step(ours, 100.0)


def test_gradients_of_gradients_are_pytorchs():
    torch.manual_seed(0)
    eager = Rows()
    ours = ORTModule(copy.deepcopy(eager))
    found = []
    for module in (eager, ours):
        x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH).requires_grad_()
        (dx,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        dx.square().sum().backward()
        found.append([dx.detach(), x.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(found[1], found[0])
    assert explain(ours).breaks
