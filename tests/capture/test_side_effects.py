"""What other code does while a module is traced is not blamed on the module."""

import gc

import torch
from torch import nn

from ortmodule import ORTModule, explain

CLOSED = []  # for each bar: was it in a trace?


class Bar:
    """Is closed when it is collected, as a progress bar is."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        CLOSED.append(torch.jit.is_tracing())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        gc.set_threshold(700, 1, 1)
        made = [[i] for i in range(4000)]  # enough for a collection
        return self.second(self.first(x)).sum() + len(made)


def test_finalizers_of_older_garbage():
    model, x = ORTModule(Net()), torch.ones(2, 3)
    gc.collect()
    before = gc.get_threshold()
    try:
        gc.set_threshold(10**7, 10**7, 10**7)
        for _ in range(3):
            Bar()
        model(x).backward()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert CLOSED == [False] * 3 and explain(model).captured
