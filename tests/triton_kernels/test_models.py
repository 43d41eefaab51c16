"""Wrapped modules whose graphs become Triton kernels, which the interpreter runs: a step against PyTorch's."""

import copy

import onnx
import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule
from ortmodule.core.logger import warn_once
from ortmodule.engine import session
from ortmodule.triton_kernels import interpreted, maker


@pytest.fixture(autouse=True)
def fresh():
    warn_once.cache_clear()


def plans_of(wrapped):
    graphs = [graph for found in wrapped._ortmodule.graphs.values() for graph in found]
    return [plan for graph in graphs for plan in graph.session.plans.values()]


def nodes_of(wrapped):
    """Attributes of the kernels of a module's plans."""
    return [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for plan in plans_of(wrapped)
        for node in onnx.load_model_from_string(plan.onnx()).graph.node
        if node.op_type.startswith("TritonChain")
    ]


def programs_of(wrapped):
    return [node["program"].decode() for node in nodes_of(wrapped)]


def kernels_of(wrapped):
    """The operators of each kernel."""
    return [
        tuple(line.split()[1] for line in text.splitlines() if line.startswith("step "))
        for text in programs_of(wrapped)
    ]


class Block(nn.Module):
    """A layer of a transformer, with a norm that has no bias, an activation and a residual."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(24), nn.RMSNorm(24)
        self.first, self.up, self.down = nn.Linear(24, 24), nn.Linear(24, 40), nn.Linear(40, 24)
        self.drop = nn.Dropout(drop)

    def forward(self, x, mask):
        x = self.first(x).tanh()
        y = self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))
        scores = (y @ y.transpose(-1, -2)) / 24**0.5 + mask
        return self.last(x + scores.softmax(-1) @ y).sigmoid()


def step(module, x, mask, dtype=None):
    module.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = module(x, mask)
    out.float().square().mean().backward()
    return [out.detach().float(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_layer(dtype):
    """Results and gradients of two batches; forward and backward have kernels, and no other chains are left of them."""
    module = Block()
    wrapped = ORTModule(copy.deepcopy(module), config=Config(use_triton=True, capture_share=float("inf")))
    for rows in (3, 5):
        x, mask = (
            torch.randn(2, rows, 24),
            torch.zeros(rows, rows).masked_fill(torch.ones(rows, rows).triu(1) > 0, -1e9),
        )
        tolerance = {} if dtype is None else {"rtol": 0.05, "atol": 0.02}
        for ours, theirs in zip(step(wrapped, x, mask, dtype), step(module, x, mask, dtype), strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)
    made = [op for ops in kernels_of(wrapped) for op in ops]
    assert {"LayerNormalization", "LayerNormGrad", "RMSNormalization", "RMSNormGrad"} <= set(made)
    assert any("Softmax" in ops and len(ops) > 1 for ops in kernels_of(wrapped))


def test_dropout_draws_what_the_engine_draws():
    """The same elements are dropped as without Triton, in forward and backward, whatever the kernels are cut into."""
    module, x, mask = Block(drop=0.4), torch.randn(2, 5, 24), torch.zeros(5, 5)
    found = []
    for use in (True, False):
        wrapped = ORTModule(copy.deepcopy(module), config=Config(use_triton=use))
        torch.manual_seed(3)
        found.append(step(wrapped, x, mask))
        if use:
            assert any("DropoutTrain" in ops for ops in kernels_of(wrapped))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- where there are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (("triton_module", lambda: None), "the package triton is not installed, or cannot be imported"),
        (("is_on", lambda: False), "Triton compiles for GPUs, and this module is on the CPU"),
    ],
)
def test_without_kernels_it_is_said_once(fault, sentence, monkeypatch):
    name, instead = fault
    monkeypatch.setattr(interpreted if name == "is_on" else maker, name, instead)
    wrapped, x = ORTModule(nn.Sequential(nn.Tanh(), nn.Sigmoid()), config=Config(use_triton=True)), torch.randn(3, 4)
    with pytest.warns(UserWarning, match=f"ORTMODULE_USE_TRITON has no effect: {sentence}; the engine's own") as said:
        for rows in (3, 4):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(wrapped(x), x.tanh().sigmoid())
    assert sum("TRITON" in str(w.message) for w in said) == 1 and not kernels_of(wrapped)


def test_a_kernel_that_fails_names_itself(monkeypatch):
    """An error of a kernel in a run is one, and not a wrong result."""
    monkeypatch.setattr(session.maker, "install", lambda: None)
    module = ORTModule(nn.Sequential(nn.Tanh(), nn.Sigmoid()), config=Config(use_triton=True, strict=True))
    maker.install()
    monkeypatch.setattr(maker.Maker, "interpret", lambda *given: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        module(torch.randn(2, 3))


# --- a look at them ---------------------------------------------------------------------------------------------------


def test_debug_saves_the_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrapped = ORTModule(Block(), config=Config(use_triton=True, triton_debug=True))
    step(wrapped, torch.randn(2, 3, 24), torch.zeros(3, 3))
    folders = sorted((tmp_path / "triton_debug").iterdir())
    assert len(folders) == len(set(programs_of(wrapped)))
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"original.txt", "processed.txt", "kernel.py"}
        compile((folder / "kernel.py").read_text(), "kernel.py", "exec")
        assert (folder / "processed.txt").read_text() in programs_of(wrapped)
    text = "".join((folder / "original.txt").read_text() for folder in folders)
    assert "= Softmax(" in text and "= LayerNormalization(" in text
