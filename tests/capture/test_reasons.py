"""Reasons for PyTorch name the line of the user's code, whatever the exception says."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain


class Looks(nn.Module):
    """Looks for a key that a trace does not have: what an identity, or a memory address, is."""

    def __init__(self):
        super().__init__()
        self.layer, self.known = nn.Linear(4, 4), {}

    def forward(self, x):
        self.known = {id(x): x}
        y = self.layer(x)
        return self.known[id(y) if torch.jit.is_tracing() else id(x)] + y


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exception_of_a_trace_has_its_line():
    model = ORTModule(Looks())
    model(torch.ones(2, 4))
    reason = explain(model).fallback
    assert f"{__file__}:" in reason, reason
