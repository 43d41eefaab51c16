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


class WithHooks(nn.Module):
    """Counts on hooks of its own, which no trace calls."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.features = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2), {}
        self.body[0].register_forward_hook(lambda module, given, found: self.features.update(first=found))

    def forward(self, x):
        self.body(x)
        return self.head(self.features["first"])


class Transforms(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda v: self.body(v).sin().sum()))(x)


class Seeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        with torch.random.fork_rng():
            return self.body(x) + torch.randn(4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (WithHooks, "a hook on body.0 reaches the attribute features, which forward reads"),
        (Transforms, "uses a transform of torch.func"),
        (Seeds, f"{__file__}:"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_said(cls, said):
    model = ORTModule(cls())
    model(torch.ones(2, 4)).sum().backward()
    assert said in explain(model).fallback
