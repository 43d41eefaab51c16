"""Every operator case: forward against PyTorch, gradients against autograd and finite differences, random shapes."""

from dataclasses import replace

import onnx
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.ops import table
from tests.ops.cases import FAMILIES
from tests.ops.harness import Trial, differentiable


def marks(case, dtype):
    """What is done with a case on the emulated GPU: without --full neither float16 and float64 nor a convolution of
    real size, which takes it a minute; under sanitizers the operators of WATCHED, in one type."""
    found = []
    if dtype in ("float16", "float64") or "64x56x56" in case.label:
        found.append(pytest.mark.emulated_full)
    if case.op in WATCHED and dtype == "float32":
        found.append(pytest.mark.sanitized)
    return found


#: Operators whose kernels share memory between threads, or find their elements by numbers in the data.
WATCHED = {
    *("Softmax", "LogSoftmax", "Hardmax", "ortmodule::MaskedSoftmax", "ortmodule::MaskedSoftmaxDropout"),
    *("ortmodule::SoftmaxDropout", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
    *("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization"),
    *("LpNormalization", "MeanVarianceNormalization", "ortmodule::FusedNorm", "ortmodule::FusedNormRandom"),
    *("ortmodule::EmbeddingNorm", "CumSum", "ortmodule::CumArgMax", "ortmodule::CumArgMin", "ortmodule::CumProd"),
    *("ortmodule::LogCumSumExp", "ScatterElements", "ScatterND", "ortmodule::GatherGradAdd", "GridSample"),
    *("ortmodule::Rotary", "GRU", "LSTM", "RNN", "RandomNormal", "RandomNormalLike"),
}
EACH = [
    pytest.param(case, dtype, id=f"{family}-{case.label}-{dtype}", marks=marks(case, dtype))
    for family, cases in FAMILIES.items()
    for case in cases
    for dtype in case.dtypes
]
FIRST_TYPE = [pytest.param(*p.values, id=p.id) for p in EACH if p.values[1] == p.values[0].dtypes[0]]
SMOOTH = [
    pytest.param(*p.values, id=p.id, marks=[mark for mark in p.marks if mark.name == "emulated_full"])
    for p in EACH
    if p.values[0].has_gradient and p.values[0].fd and p.values[1] == "float64" and differentiable(*p.values)
]


def check(trial):
    trial.check_forward()
    if trial.wrt:
        trial.check_gradient()


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_case(case, dtype):
    """Outputs, in a run without gradients and in one with; gradients against autograd."""
    check(Trial(case, dtype))


@pytest.mark.emulated
@pytest.mark.parametrize(("case", "dtype"), SMOOTH)
def test_finite_differences(case, dtype):
    trial = Trial(case, dtype)
    grads = trial.run(training=True).grads
    generator = torch.Generator().manual_seed(0)
    for i in trial.wrt:
        x = trial.tensors[i]
        if x.dtype != torch.float64:
            continue
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        exact = 0.0 if grads[i] is None else float((grads[i] * direction).sum())
        numeric = trial.slope(i, direction)
        assert exact == pytest.approx(numeric, rel=1e-5, abs=1e-6), f"slope along operand {i}"


# --- random sizes -----------------------------------------------------------------------------------------------------


def resized(case, sizes):
    """The operands with every size replaced by another; ones stay, so that broadcasting stays."""
    return [
        replace(spec, shape=tuple(sizes.get(d, d) for d in spec.shape)) if spec and spec.fixed is None else spec
        for spec in case.inputs
    ]


@pytest.mark.emulated
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
        trial = Trial(case, dtype, tensors)
    except (RuntimeError, IndexError, ValueError, ArithmeticError):
        assume(False)  # the operands do not go together at these sizes
    trial.check_drawn()


# --- the list itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), FIRST_TYPE)
def test_case_is_valid_onnx(case, dtype):
    onnx.checker.check_model(Trial(case, dtype).model)


def test_every_operator_has_a_case():
    missing = table.untested()
    assert not missing, f"operators that no case reaches: {', '.join(missing)}"


def test_documentation_is_current():
    assert table.PATH.read_text() == table.render(), "run: python -m tests.ops.table"
