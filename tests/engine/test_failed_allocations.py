"""Each block of memory that a training step asks the engine for fails in turn: MemoryError, and the next step is right.

Plans' own allocations are failed in tests/c/test_faults.c, one by one."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from ortmodule.optim import FusedAdam

pytestmark = pytest.mark.filterwarnings("error")


class Block(nn.Module):
    """A Transformer block, with a loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x).square().mean()


class Pictures(nn.Module):
    """A convolutional network, with a loss."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.linear = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.linear(self.pool(self.norm(self.conv(x)).relu()).flatten(1)).square().mean()


CASES = {"transformer": (Block, (2, 5, 16)), "pictures": (Pictures, (2, 3, 8, 8))}


def step(model, optimizer, x):
    model.zero_grad()
    model(x).backward()
    optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_each_allocation_of_a_step(case):
    make, shape = CASES[case]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    model = ORTModule(copy.deepcopy(module).train())
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    step(model, optimizer, x)
    was = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def after_one_step():
        model.load_state_dict(was[0])
        optimizer.load_state_dict(copy.deepcopy(was[1]))
        step(model, optimizer, x)
        return copy.deepcopy(model.state_dict())

    right, failures = after_one_step(), 0
    for after in range(1000):
        _core.fail_memory(after)
        try:
            step(model, optimizer, x)
        except MemoryError as error:
            failures += 1
            assert "out of memory" in str(error)
        else:
            break
        finally:
            _core.fail_memory(-1)
        for name, value in after_one_step().items():
            assert torch.equal(value, right[name]), (after, name)
    assert failures > 5, "nothing of this asks for memory"
    memory = _core.memory()["used"]
    after_one_step()
    assert _core.memory()["used"] == memory
