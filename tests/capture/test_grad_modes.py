"""What forward computes without gradients carries none in the graph; what it records in a call without is PyTorch's."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import rows

pytestmark = pytest.mark.filterwarnings("ignore")

#: What is computed with hidden states where autograd does not record.
UNSEEN = {
    "max": lambda h: torch.max(h, 1).values,
    "min, by name": lambda h: h.min(dim=1, keepdim=True).values[:, 0],
    "sort": lambda h: h.sort(dim=1).values[:, 1],
    "topk": lambda h: h.topk(2, 1)[0].sum(1),
    "median": lambda h: torch.median(h, 1)[0],
    "cummax": lambda h: h.cummax(1).values[:, -1],
    "kthvalue": lambda h: torch.kthvalue(h, 2, 1).values,
    "aminmax": lambda h: torch.aminmax(h, dim=1).max,
    "svd": lambda h: torch.linalg.svd(h).S.sum() * h[:, 0],
    "var_mean": lambda h: torch.var_mean(h, 1)[0],
    "split": lambda h: h.split(2, 1)[0].sum(1),
    "unbind": lambda h: h.unbind(1)[1],
    "chunk": lambda h: torch.chunk(h, 2, 1)[1][:, 0],
    "meshgrid": lambda h: torch.meshgrid(h[:, 0], h[0], indexing="ij")[0][:, 0],
    "out": lambda h: torch.mul(h, 2, out=torch.empty_like(h))[:, 0],
    "out of several": lambda h: torch.max(h, 1, out=(h.new_empty(len(h)), torch.empty(len(h), dtype=torch.long)))[0],
    "out by name": lambda h: torch.add(input=h, other=h, alpha=2, out=torch.empty_like(h))[:, 1],
    "scatter_": lambda h: torch.zeros_like(h).scatter_(1, h.argmax(1, True), h.max(1, True).values).sum(1),
    "in place": lambda h: torch.ones_like(h).mul_(h).add_(h.amax(1, True))[:, 0],
    "plain": lambda h: h.sum(1),
}
WAYS = {"no_grad": torch.no_grad, "set_grad_enabled": lambda: torch.set_grad_enabled(False)}


SHORT = {(name, "no_grad") for name in ("max", "sort", "out", "out by name", "scatter_", "unbind")}


class Inner(nn.Linear):
    @torch.enable_grad()
    def forward(self, x):
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.inner = Inner(4, 4)
        self.first, self.last, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use

    def forward(self, x):
        return self.use(self, x)


def compare(use, captured=True, call=lambda module, x: module(x)):
    torch.manual_seed(0)
    eager = Net(use)
    ours = ORTModule(copy.deepcopy(eager))
    for count in (3, 5, 4):
        found = []
        for module in (eager, ours):
            module.zero_grad()
            x = rows(count, 4).requires_grad_()
            results = call(module, x)
            if any(r.requires_grad for r in results):
                sum(r.square().sum() for r in results if r.requires_grad).backward()
            found.append(([r.requires_grad for r in results], *results, x.grad, *(p.grad for p in module.parameters())))
        assert found[0][0] == found[1][0]
        torch.testing.assert_close(found[1][1:], found[0][1:])
    assert explain(ours).captured == captured, explain(ours).fallback


@each("name, way", [(n, w) for n in UNSEEN for w in WAYS], SHORT)
def test_without_gradients(name, way):
    def use(net, x):
        h = net.first(x)
        with WAYS[way]():
            factor = UNSEEN[name](h)
        return net.last(h) * factor[:, None], factor * 1

    compare(use)


def recorded(enable):
    def use(net, x):
        with enable():
            h = net.first(x)
        return net.last(h), h

    return use


RECORDED = {
    "enable_grad": recorded(torch.enable_grad),
    "set_grad_enabled": recorded(lambda: torch.set_grad_enabled(True)),
    "of the input": lambda net, x: (with_gradients(lambda: x * 2), net.first(x)),
    "of a parameter": lambda net, x: (with_gradients(lambda: net.last.weight * 2), net.first(x)),
    "a submodule": lambda net, x: (net.inner(x), net.first(x)),
}


def with_gradients(function):
    with torch.enable_grad():
        return function()


def without(module, x):
    with torch.no_grad():
        return module(x)


@each("name", RECORDED, ("enable_grad", "a submodule"))
def test_recorded_in_a_call_without_gradients(name):
    compare(RECORDED[name], captured=False, call=without)


def test_nothing_to_record():
    def use(net, x):
        h = with_gradients(lambda: x * 2)
        return (net.last(h),)

    compare(use, call=lambda module, x: without(module, x.detach()))
