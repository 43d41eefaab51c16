"""A step of an optimizer is seen that no call of its module has come before."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.runtime.calls.usage import UNREACHED, Usage


@pytest.fixture
def used():
    """A module, its usage, and what was said."""
    module, said = nn.Linear(2, 1), []
    return module, Usage(module, said.append), said


def step(module, optimizer=None, closure=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step(closure) if closure else optimizer.step()
    return optimizer


def test_counts(used):
    _, usage, _ = used
    usage.engine, usage.pytorch = 3, 2
    assert usage.calls == 5


def test_a_step_without_a_call(used):
    module, usage, said = used
    step(module)
    assert said == [UNREACHED] and usage.unreached == 1


def test_a_step_after_a_call(used):
    module, usage, said = used
    usage.engine = 1
    optimizer = step(module)
    usage.engine = 2
    step(module, optimizer)
    assert said == []
    step(module, optimizer)  # no call came between
    assert said == [UNREACHED]


def test_a_call_inside_of_a_closure(used):
    module, usage, said = used

    def closure():
        usage.pytorch += 1
        return module(torch.ones(1, 2)).sum()

    step(module, closure=closure)
    assert said == []


def test_without_gradients(used):
    module, _, said = used
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)  # as zero_grad(set_to_none=False) leaves it
    optimizer.step()
    assert said == []


def test_other_modules_and_inner_ones(used):
    module, usage, said = used
    step(nn.Linear(2, 1))
    usage.inner = True
    step(module)
    assert said == []


def test_two_wrapped_modules_with_the_same_parameters(recwarn):
    """A step behind one of them is no step without a call of the other; one behind neither is."""
    layer = nn.Linear(4, 4)
    first, second = ORTModule(nn.Sequential(layer)), ORTModule(nn.Sequential(layer, nn.ReLU()))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        first(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert explain(second).unreached_steps == 0 and not [w for w in recwarn if "not called through" in str(w.message)]
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert explain(second).unreached_steps == explain(first).unreached_steps == 1
