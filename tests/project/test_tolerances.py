"""The comparisons of the tests see what they compare: zeros pass for zeros alone, and small errors for none."""

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.exact import assert_as_near
from tests.models import compare, trial
from tests.ops.harness import Blind, assert_same
from tests.probe.trial import COARSE, ENTRIES, apart, times_of
from tests.tolerances import FUNCTION, OPERATOR, assert_near, bounds, largest, unseen

KINDS = list(OPERATOR)
IDS = [str(kind).removeprefix("torch.") for kind in KINDS]


@st.composite
def tensors(draw, kind):
    """Numbers of any size that the type has, from much below its tolerance to much above."""
    shape = draw(st.sampled_from([(1,), (7,), (3, 5), (2, 3, 40)]))
    power = draw(st.integers(-6 if kind == torch.float16 else -30, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**power).to(kind)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@given(data=st.data())
def test_zeros_are_never_something_else(kind, data):
    expected = data.draw(tensors(kind))
    assume(expected.any())
    zeros = torch.zeros_like(expected)
    with pytest.raises(AssertionError):
        assert_same(zeros, expected, "zeros", sees=False)
    assert apart(zeros, expected)
    with pytest.raises(AssertionError):
        assert_as_near({"g": zeros}, {"g": expected}, {"g": expected.double()}, kind)
    assert_same(expected, expected, "itself", sees=False)
    assert not apart(expected, expected)
    assert_as_near({"g": expected}, {"g": expected}, {"g": expected.double()}, kind)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@given(data=st.data())
def test_an_error_of_a_tenth_is_seen(kind, data):
    """Of the largest element alone, and of all."""
    expected = data.draw(tensors(kind))
    assume(largest(expected) > 0)
    at = expected.double().abs().argmax()
    one = expected.clone()
    one.view(-1)[at] *= 1.1
    for wrong in (one, expected * 1.1):
        assume(largest(wrong.double() - expected.double()) > 0.09 * largest(expected))  # not where denormals round
        with pytest.raises(AssertionError):
            assert_same(wrong, expected, "a tenth", sees=False)
        assert apart(wrong, expected)


def test_a_case_that_shows_nothing_is_an_error():
    expected = torch.full((100,), 1e-9)
    expected[0] = 1.0
    with pytest.raises(Blind, match="zeros would do for 99.0% of the elements"):
        assert_same(expected, expected, "a peak")
    assert_same(expected, expected, "a peak", share=1e-7)
    with pytest.raises(Blind, match="zeros would pass for anything"):
        assert_same(expected.bfloat16(), expected.bfloat16(), "a tolerance", tol=100)


def test_pytorch_that_is_no_measure_is_an_error():
    """Where PyTorch's own error is as large as the result, nothing can be compared with it."""
    exact = {"g": torch.ones(3, dtype=torch.float64)}
    with pytest.raises(AssertionError, match="PyTorch's own is off"):
        assert_as_near({"g": torch.ones(3)}, {"g": torch.zeros(3)}, exact, torch.float32)


def test_coarser_tolerances_are_tolerances():
    assert COARSE.keys() <= ENTRIES.keys()
    for name in COARSE:
        for kind, (relative, share) in FUNCTION.items():
            assert times_of(name, [torch.ones(1, dtype=kind)]) * (relative + share) < 0.5


def test_unseen():
    expected = torch.tensor([0.0, 1.0, 1e-9, torch.inf, torch.nan])
    assert unseen(expected, bounds(expected, 1e-3, 1e-6)) == 0.5


def test_steps_without_gradients_are_not_those_with_some():
    """Of a step in all: one gradient, whichever it is, or the loss, that is zeros or not finite."""
    torch.manual_seed(0)
    grads = {name: torch.randn(7, 3) * scale for name, scale in {"a": 1.0, "b": 0.5, "c": 3.0}.items()}
    loss = torch.tensor(2.5)
    compare.assert_same_step((loss, grads), (loss, grads), "itself")
    whole = loss, grads, [grads["a"]], {"mean": grads["b"]}
    assert trial.deviation(whole, whole) == (0, 0)
    for bad in (0.0, torch.inf, torch.nan):
        for name in grads:
            wrong = grads | {name: grads[name] * 0 + bad}
            with pytest.raises(AssertionError):
                compare.assert_same_step((loss, wrong), (loss, grads), "a gradient")
            assert trial.deviation((loss, wrong, *whole[2:]), whole)[1] > max(trial.TOLERANCE[torch.float32])
            with pytest.raises(AssertionError):
                assert_near(wrong.values(), grads.values(), 0.1)
        with pytest.raises(AssertionError):
            compare.assert_same_step((loss * 0 + bad, grads), (loss, grads), "the loss")
        for wrong in ([grads["a"] * 0 + bad], whole[3]), (whole[2], {"mean": grads["b"] * 0 + bad}):
            try:
                assert trial.deviation((loss, grads, *wrong), whole)[0] > trial.TOLERANCE[torch.float32][0]
            except trial.Different:
                assert bad != 0


def test_no_comparison_is_coarse():
    """Tolerances that tests write down: a twentieth at most, in 16 bits, too."""
    coarse = {}
    for file in Path("tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            said = (
                isinstance(node, ast.keyword) and node.arg in ("atol", "rtol") and isinstance(node.value, ast.Constant)
            )
            if said and node.arg in ("atol", "rtol") and (node.value.value or 0) > 0.05:
                coarse[f"{file}:{node.value.lineno}"] = node.value.value
    assert not coarse
