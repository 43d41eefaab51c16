"""Every operator case: forward against PyTorch, gradients against autograd and finite differences, random shapes."""

from dataclasses import replace

import onnx
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ops import table
from tests.ops.cases import FAMILIES
from tests.ops.harness import (
    assert_same,
    assert_same_gradient,
    build_model,
    differentiable,
    engine,
    reference,
    slope,
    upstream,
)

EACH = [
    pytest.param(case, dtype, id=f"{family}-{case.label}-{dtype}")
    for family, cases in FAMILIES.items()
    for case in cases
    for dtype in case.dtypes
]
WITH_GRADIENT = [p for p in EACH if p.values[0].has_gradient and differentiable(*p.values)]
SMOOTH = [p for p in WITH_GRADIENT if p.values[1] == "float64" and p.values[0].fd]


def check_forward(case, dtype, tensors):
    ours, expected = engine(case, dtype, tensors).outputs, reference(case, tensors).outputs
    assert len(ours) == len(expected), f"{len(ours)} outputs, PyTorch has {len(expected)}"
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert_same(a, b, f"output {i}", case.tol)


def check_gradient(case, dtype, tensors):
    wrt = differentiable(case, dtype)
    dys = upstream(reference(case, tensors).outputs)
    expected = reference(case, tensors, wrt, dys)
    ours = engine(case, dtype, tensors, wrt, dys)
    for i, (a, b) in enumerate(zip(ours.outputs, expected.outputs, strict=True)):
        assert_same(a, b, f"output {i} of a run with gradients", case.tol)
    for i in wrt:
        assert_same_gradient(ours.grads[i], expected.grads[i], tensors[i], f"gradient of operand {i}", case.tol)


@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_forward(case, dtype):
    check_forward(case, dtype, case.tensors(dtype))


@pytest.mark.parametrize(("case", "dtype"), WITH_GRADIENT)
def test_gradient(case, dtype):
    check_gradient(case, dtype, case.tensors(dtype))


@pytest.mark.parametrize(("case", "dtype"), SMOOTH)
def test_finite_differences(case, dtype):
    tensors = case.tensors(dtype)
    wrt = [i for i in differentiable(case, dtype) if tensors[i].dtype == torch.float64]
    dys = upstream(engine(case, dtype, tensors).outputs)
    grads = engine(case, dtype, tensors, wrt, dys).grads
    generator = torch.Generator().manual_seed(0)
    for i in wrt:
        grad = torch.zeros_like(tensors[i]) if grads[i] is None else grads[i]
        for _ in range(2):
            direction = torch.randn(tensors[i].shape, generator=generator, dtype=torch.float64)
            numeric = slope(lambda moved: engine(case, dtype, moved).outputs, tensors, i, direction, dys, 1e-5)
            exact = float((grad * direction).sum())
            assert exact == pytest.approx(numeric, rel=1e-5, abs=1e-6), f"slope along operand {i}"


# --- random sizes -----------------------------------------------------------------------------------------------------


def resized(case, sizes):
    """The operands with every size replaced by another; ones stay, so that broadcasting stays."""
    return [
        replace(spec, shape=tuple(sizes.get(d, d) for d in spec.shape)) if spec and spec.fixed is None else spec
        for spec in case.inputs
    ]


@pytest.mark.parametrize("family", [family for family, cases in FAMILIES.items() if any(c.resize for c in cases)])
@given(data=st.data())
def test_random_sizes(family, data):
    case = data.draw(st.sampled_from([case for case in FAMILIES[family] if case.resize]))
    dtype = data.draw(st.sampled_from(case.dtypes))
    old = sorted({d for spec in case.inputs if spec and spec.fixed is None for d in spec.shape if d != 1})
    sizes = {d: data.draw(st.sampled_from([d, 0, 1, 2, 3, 7, 16, 33, 65]), label=f"size instead of {d}") for d in old}
    specs = resized(case, sizes)
    assume(sum(spec is not None and torch.Size(spec.shape).numel() > 200_000 for spec in specs) == 0)
    tensors = case.tensors(dtype, data.draw(st.integers(0, 99), label="seed"), specs)
    try:
        reference(case, tensors)
    except (RuntimeError, IndexError, ValueError):
        assume(False)  # the operands do not go together at these sizes
    check_forward(case, dtype, tensors)
    if case.has_gradient and differentiable(case, dtype):
        check_gradient(case, dtype, tensors)


# --- the list itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), [p for p in EACH if p.values[1] == p.values[0].dtypes[0]])
def test_case_is_valid_onnx(case, dtype):
    onnx.checker.check_model(build_model(case, dtype, case.tensors(dtype)))


def test_every_operator_has_a_case():
    missing = table.untested()
    assert not missing, f"operators that no case reaches: {', '.join(missing)}"


def test_documentation_is_current():
    assert table.PATH.read_text() == table.render(), "run: python -m tests.ops.table"
