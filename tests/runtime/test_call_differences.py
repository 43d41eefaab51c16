"""Kinds of calls rest on all arguments but tensors and numbers, and texts name the first thing that differs."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.core import pytree
from ortmodule.runtime.variants import call_differences
from ortmodule.runtime.variants.call_differences import kind

X = torch.ones(2, 3)


def test_kinds():
    base = kind((X, 3), {"mode": "train"})
    assert base == kind((X + 1, 4), {"mode": "train"})
    others = [((X, 3), {"mode": "test"}), ((X, 3), {}), ((X, X), {"mode": "train"}), (([X], 3), {"mode": "train"})]
    assert all(kind(*other) != base for other in others)
    assert hash(base) == hash(kind((X, 4), {"mode": "train"}))


class Call:
    def __init__(self, *args, modes=(), state=0):
        tensors, self.arguments = pytree.flatten(args)
        kinds = tuple((t.dtype, t.dim(), t.requires_grad, t.device) for t in tensors)
        of_modes = dict(zip(range(7), [True, False, None, None, "float32", False, "own"], strict=True)) | dict(modes)
        self.key = (self.arguments, kinds, *of_modes.values(), state, 0)
        self.shapes = tuple(tuple(t.shape) for t in tensors)


def described(call, other):
    return call_differences.describe(call, [], [], [other.key])


def same_structure(a, b):
    b.key = (a.key[0], *b.key[1:])
    return a, b


@pytest.mark.parametrize(
    "other, text",
    [
        (X.double(), "input 0 is float32 with 2 dimensions, and float64 with 2 dimensions in the graph that there is"),
        (X[0], "input 0 is float32 with 2 dimensions, and float32 with 1 dimensions in the graph that there is"),
        (X.clone().requires_grad_(), "and float32 with 2 dimensions and a gradient in the graph that there is"),
    ],
)
def test_another_kind_of_input(other, text):
    found, place = described(*same_structure(Call(X), Call(other)))
    assert text in found and place == "the types, ranks or gradients of its tensors"


def test_modes():
    call, other = same_structure(Call(X), Call(X, modes={0: False}))
    assert described(call, other) == ("the grad mode is True, and False in the graph that there is", "the grad mode")


def test_other_arguments():
    text, place = described(Call(X, "sum", True), Call(X, "mean", True))
    assert text == "its arguments are 1 tensors and 'sum', True" and place == "its arguments"
    assert len(described(Call(X, "s" * 500), Call(X, "mean"))[0]) < 120


def test_the_first_call():
    assert call_differences.describe(Call(X), [], [], []) == ("its first call", "")
    call = Call(X)
    assert call_differences.split(call, [], []) is call.key


def test_a_hook_that_stays(monkeypatch):
    """As the one that transformers leaves on the embedding when checkpointing is switched off again."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "0")
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    model(X).sum().backward()
    model.module[0].register_forward_hook(lambda module, inputs, output: output.detach().requires_grad_())
    with pytest.warns(UserWarning, match="hooks on submodules are others"):
        model(X)
    assert "hooks on submodules are others" in explain(model).fallback
