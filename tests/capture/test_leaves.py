"""Tensors that forward makes for a gradient of their own, and gives away: autograd's, in PyTorch."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Leaf(nn.Module):
    def __init__(self, make, keep):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)
        self.make, self.keep, self.leaf = make, keep, None

    def forward(self, x):
        hidden = self.first(x)
        leaf = self.make(hidden)
        loss = self.second(leaf + hidden).square().sum()
        if self.keep == "attribute":
            self.leaf = leaf
        return (loss, {"leaf": leaf}) if self.keep == "result" else (loss, {})


MAKERS = {
    "detach().requires_grad_()": lambda h: h.detach().requires_grad_(),
    "zeros_like(requires_grad=True)": lambda h: torch.zeros_like(h, requires_grad=True),
    "clone().detach()": lambda h: h.clone().detach().requires_grad_(True),
}


@pytest.mark.parametrize("keep", ["attribute", "result", "nowhere"])
@pytest.mark.parametrize("name", MAKERS)
def test_it_has_the_gradient_that_it_has_in_pytorch(name, keep):
    found = []
    for wrap in (ORTModule, lambda module: module):
        torch.manual_seed(0)
        module = wrap(Leaf(MAKERS[name], keep))
        loss, kept = module(torch.ones(2, 3))
        loss.backward()
        leaf = kept.get("leaf", module.leaf)
        assert (leaf is None) == (keep == "nowhere")
        found.append([loss.detach(), module.first.weight.grad, *([leaf.grad] if leaf is not None else [])])
        if wrap is ORTModule:
            reason = explain(module).fallback
            assert (reason is None) == (keep == "nowhere")
            assert reason is None or "a gradient of its own" in reason
    torch.testing.assert_close(*found)
