"""Reasons for PyTorch name the line of the user's code, whatever the exception says."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture.trace_comparison import RESULTS, difference
from ortmodule.core.torch_private import reset_trace_module_map, setup_trace_module_map


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


MATRIX = "Float(2, 3, strides=[3, 1], requires_grad=0, device=cpu)"


def trace_of(graph):
    fields = dict.fromkeys(RESULTS) | dict.fromkeys(("size_reads", "data_reads", "sets", "draws", "nodes"), ())
    return SimpleNamespace(graph=graph, requires_grad=(True,), **fields)


def traced(body):
    """A trace whose graph is this, of a tensor %x."""
    return trace_of(torch._C.parse_ir(f"graph(%x : {MATRIX}):\n{body}\n  return (%y)"))


ONE = f"""  %n : int = prim::Constant[value=1]()
  %y : {MATRIX} = aten::add(%x, %x, %n)"""
DIFFERENT = {
    "a number is 1 in one of them and 2 in the other": ONE.replace("value=1", "value=2"),
    "one of them calls add where the other calls sub": ONE.replace("aten::add", "aten::sub"),
    "one of them goes on, with relu": ONE.replace("%y", "%z") + f"\n  %y : {MATRIX} = aten::relu(%z)",
    "add has other operands": ONE.replace("(%x, %x, %n)", "(%x, %n, %n)"),
}


@pytest.mark.parametrize("said", DIFFERENT)
def test_how_two_graphs_differ(said):
    """In operators and numbers, not in what values are called inside a graph."""
    assert difference(traced(ONE), traced(DIFFERENT[said])) == said


class Plus(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.add(x, x, alpha=self.factor)


def test_the_submodule_is_named_in_which_graphs_differ():
    traces = []
    for module in (nn.Sequential(nn.Tanh(), Plus(factor)) for factor in (3, 4)):
        setup_trace_module_map(module, False)
        try:
            traces.append(trace_of(torch.jit._get_trace_graph(module, torch.ones(2, 3))[0]))
        finally:
            reset_trace_module_map()
    assert difference(*traces, ["0", "1"]) == "in 1, a number is 3 in one of them and 4 in the other"


def test_sizes_of_a_graph_may_differ():
    assert difference(traced(ONE), traced(ONE.replace(MATRIX, MATRIX.replace("2, 3", "4, 3")))) == ""
