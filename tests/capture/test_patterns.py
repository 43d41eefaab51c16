"""Patterns of the user's own: what is found, what is left alone, and that results and gradients stay."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain, patterns

DOCS = Path(__file__).parents[2] / "docs" / "patterns.md"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    for name in patterns.registered():
        patterns.unregister(name)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *operands):
        return self.function(*operands)


def examples(count=1, *shape):
    return [torch.randn(shape or (2, 3)) for _ in range(count)]


def spelled(x):
    return x / (1 + x.abs())


def register_softsign(**options):
    patterns.register("softsign", spelled, F.softsign, examples(), **options)


def found(function, *operands):
    """How often patterns were found in a function; its results and gradients are PyTorch's."""
    model = ORTModule(Function(function))
    ours = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    theirs = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    y, expected = model(*ours), function(*theirs)
    dy = torch.randn_like(expected)
    y.backward(dy)
    expected.backward(dy)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)
    report = explain(model)
    assert report.captured
    return {name: report.fused[name] for name in patterns.registered() if name in report.fused}


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_type(dtype):
    register_softsign()
    assert found(lambda x: spelled(x * 2).exp(), torch.randn(4, 5, dtype=dtype)) == {"softsign": 1}


def test_either_order_and_more_than_once():
    register_softsign()
    assert found(lambda x: spelled(x) + x.sin() / (x.sin().abs() + 1), torch.randn(3, 4)) == {"softsign": 2}


def test_an_operand_is_any_value():
    patterns.register("scaled", lambda x, s: (x * s).tanh() * s, lambda x, s: s * torch.tanh(s * x), examples(2))
    assert found(lambda x: (x * 0.3).tanh() * 0.3, torch.randn(3, 4)) == {"scaled": 1}
    assert found(lambda x, y: (y * x).tanh() * y, torch.randn(3, 4), torch.randn(3, 4)) == {"scaled": 1}


def test_the_replacement_is_what_runs():
    """With a replacement that computes something else, and no example to show it at registration, PyTorch runs."""
    patterns.register("wrong", spelled, lambda x: F.softsign(x) + 1, examples(), check=False)
    model = ORTModule(Function(spelled))
    x = torch.randn(3, 4)
    with pytest.warns(UserWarning, match="does not compute what the module does"):
        torch.testing.assert_close(model(x), spelled(x))
    assert "does not compute what the module does" in explain(model).fallback


def test_an_identity():
    patterns.register("twice-negated", lambda x: -(x.abs().neg()).abs().neg(), torch.abs, examples())
    assert found(lambda x: -(x.abs().neg()).abs().neg() + 1, torch.randn(3)) == {"twice-negated": 1}
    patterns.register("undone", lambda x: (x * 4) / 4, lambda x: x, examples())
    assert found(lambda x: (x * 4) / 4, torch.randn(3, 5)) == {"undone": 1}


def test_patterns_go_in_order():
    register_softsign()
    patterns.register("again", F.softsign, lambda x: x / (x.abs() + 1), examples())
    assert patterns.registered() == ["softsign", "again"]
    assert found(spelled, torch.randn(3, 4))["softsign"] == 1


# --- what is left alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / (2 + x.abs()),  # another number
        lambda x: (1 + x.abs()) / x,  # a division is not turned round
        lambda x: x.sin() / (1 + x.abs()),  # two values
        lambda x: x / (1 + x.abs()) + x.abs(),  # what lies inside is used outside
    ],
)
def test_what_is_nearly_it(function):
    register_softsign()
    assert found(function, torch.rand(3, 4) + 0.5) == {}


def test_an_inner_value_that_is_returned():
    register_softsign()

    def both(x):
        size = x.abs()
        return x / (1 + size), size

    model, x = ORTModule(Function(both)), torch.randn(3, 4)
    for ours, theirs in zip(model(x), both(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "softsign" not in explain(model).fused


def test_unregistered_patterns_are_gone():
    register_softsign()
    patterns.unregister("softsign")
    assert patterns.registered() == [] and found(spelled, torch.randn(3)) == {}
    with pytest.raises(KeyError, match="softsign"):
        patterns.unregister("softsign")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_name_is_taken_once():
    register_softsign()
    with pytest.raises(ValueError, match="'softsign'"):
        register_softsign()


OUTSIDE = torch.ones(3)


@pytest.mark.parametrize(
    ("pattern", "replacement", "count", "message"),
    [
        (spelled, lambda x: x / (1.01 + x.abs()), 1, "the results of the two functions of 'it' differ"),
        (lambda x: x * 2, lambda x: x.detach() + x, 1, "the gradients of operand 0"),
        (spelled, lambda x: (F.softsign(x), x), 1, "must return one tensor"),
        (lambda x, y: x * 2, lambda x, y: x + x, 2, "does not use its operand 1"),
        (lambda x: x * OUTSIDE, lambda x: OUTSIDE * x, 1, "a tensor that is not among its operands"),
        (lambda x: x.sum(), lambda x: x.sum(0), 1, "another type or shape"),
    ],
)
def test_what_cannot_be_a_pattern(pattern, replacement, count, message):
    with pytest.raises(ValueError, match=message):
        patterns.register("it", pattern, replacement, examples(count))
    assert patterns.registered() == []


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_runs():
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(compile(code, str(DOCS), "exec"), {})
