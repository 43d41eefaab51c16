"""Gradients that can be differentiated again are of the forward that was: of what it found in attributes, too."""

import collections
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from ortmodule import Config, DebugOptions, LogLevel, ORTModule, explain
from tests.selection import each
from tests.twins import rows

QUIET = DebugOptions(log_level=LogLevel.FATAL)


class Island(nn.Module):
    """What PyTorch runs inside the graph: its list is changed, which no graph does."""

    def __init__(self, change):
        super().__init__()
        self.change, self.linear, self.seen = change, nn.Linear(4, 4), []
        self.value, self.number, self.items, self.table = None, 1.0, [1.0], {"factor": 1.0}
        self.queue = collections.deque([1.0, 2.0], maxlen=2)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        self.seen.append(x.shape)
        return self.linear(self.change(self, x)).sin()


class Own(Island):
    """The same in the engine."""

    def forward(self, x):
        return self.linear(self.change(self, x)).sin()


def a_tensor(self, x):
    x = x if self.value is None else x * (1 + self.value)
    self.value = x.detach().mean()
    return x


def a_number(self, x):
    self.number = self.number + 0.5
    return x * self.number


def a_list(self, x):
    self.items.append(self.items[-1] + 0.5)
    return x * sum(self.items)


def a_list_that_is_set(self, x):
    self.items = [*self.items, 2.0]
    return x * len(self.items)


def a_dictionary(self, x):
    x = x * self.table["factor"]
    self.table["factor"] *= 1.5
    return x


def a_queue(self, x):
    x = x * self.queue[0]
    self.queue.append(self.queue[-1] + 1)
    return x


def a_buffer_in_place(self, x):
    x = x * self.mean.clone()
    self.mean.mul_(0.5).add_(x.detach().mean())
    return x


def a_buffer_that_is_set(self, x):
    x = x * self.mean
    self.mean = 0.5 * self.mean + x.detach().mean()
    return x


def a_counter(self, x):
    self.count += 1
    return x * self.count.clone()


def a_new_attribute(self, x):
    x = x * getattr(self, "later", 1.0)
    self.later = 2.0
    return x


CHANGES = {f.__name__: f for f in (
    a_tensor, a_number, a_list, a_list_that_is_set, a_dictionary, a_queue, a_buffer_in_place, a_buffer_that_is_set,
    a_counter, a_new_attribute,
)}  # fmt: skip


def second(module, calls):
    """Gradients, and the gradients of their squares, of ``calls`` forwards before them."""
    x = rows(3, 4, seed=calls).double().requires_grad_()
    loss = sum(module(x * (i + 1)).square().sum() for i in range(calls))
    leaves = [x, *module.parameters()]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, allow_unused=True)
    return [*first, *again]


def state(module):
    return [module[1].value, module[1].number, module[1].items, module[1].table, [*module[1].queue],
            *module.buffers()]  # fmt: skip


def model(kind, change):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), kind(change), nn.Linear(4, 4)).double()


@each(("kind", "name"), [(k, n) for k in (Island, Own) for n in CHANGES], [(Island, "a_tensor"), (Own, "a_tensor")])
def test_what_forward_found(kind, name):
    eager = model(kind, CHANGES[name])
    ours = ORTModule(copy.deepcopy(eager), QUIET, config=Config(capture_share=float("inf")))
    for calls in (1, 2, 1, 2):
        for a, b in zip(second(ours, calls), second(eager, calls), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(state(ours), state(eager), rtol=1e-9, atol=1e-12)
    assert explain(ours).engine_calls


def test_what_others_change_between():
    """A script gives an island another attribute before the gradient of an earlier forward."""
    eager = model(Island, lambda self, x: x * self.number)
    ours, found = ORTModule(copy.deepcopy(eager)), []
    for module in (ours, eager):
        module[1].number = 1.0
        x = rows(3, 4).double().requires_grad_()
        y = module(x)
        module[1].number = 3.0
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), x)])
        assert module[1].number == 3.0
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert explain(ours).captured


def test_a_long_list():
    """It is cut to what it was; of a long dictionary it is said that it has changed."""
    for items, raises in (([1.0] * 1000, False), ({i: 1.0 for i in range(1000)}, True)):

        def change(self, x):
            count = len(self.items)
            self.items.append(2.0) if isinstance(self.items, list) else self.items.update({count: 2.0})
            return x * count / 1000

        eager = model(Island, change)
        eager[1].items = items
        ours = ORTModule(copy.deepcopy(eager))
        if raises:
            with pytest.raises(RuntimeError, match="container that the module holds was changed"):
                second(ours, 1)
        else:
            torch.testing.assert_close(second(ours, 2), second(eager, 2), rtol=1e-9, atol=1e-12)
            assert ours[1].items == eager[1].items


def test_no_graph_of_an_earlier_step_is_kept():
    """An attribute that holds a loss holds its graph; a step that replaces it lets that go as PyTorch does."""

    def change(self, x):
        self.value = x.square().mean()
        return x

    for kind in (Island, Own):
        module = ORTModule(model(kind, change))
        module(rows(3, 4).double()).sum().backward()
        graph = weakref.ref(module[1].value.grad_fn)
        kept = module(rows(3, 4).double())
        gc.collect()
        assert graph() is None
        kept.sum().backward()
