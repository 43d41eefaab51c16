"""Indices that change unseen between forward and backward: a loader refills the memory that a tensor was made of.

Backward raises, or gives the gradients of the forward's indices; it never reads or writes elsewhere. That each kernel
says what its integers are is what `emit` asks of every record (csrc/ops/op.h), in every test.
"""

import pytest
import torch

from benchmarks.checks import index_counts
from ortmodule import _core
from tests.ops.cases import FAMILIES
from tests.ops.harness import ON_GPU, Box, Trial, differentiable, made, tensors_of

#: There kernels check each index where they use it, and the fault is told after the run (tests/cuda/test_emulated.py).
pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU tells of a fault later")
INTEGERS = (torch.int64, torch.int32)
FAR = {torch.int64: 1 << 40, torch.int32: 1 << 30}


def dtype_of(case):
    return "float32" if "float32" in case.dtypes else case.dtypes[0]


def has_indices(case):
    given = [spec for i, spec in enumerate(case.inputs) if spec and i not in case.const]
    return any(spec.dtype in ("int64", "int32") for spec in given)


EACH = [
    pytest.param(case, id=f"{family}-{case.label}")
    for family, cases in FAMILIES.items()
    for case in cases
    if (has_indices(case) or family == "pool") and case.has_gradient and differentiable(case, dtype_of(case))
]


def far(tensor):
    """Its integers, far beyond any memory."""
    return torch.full_like(tensor, FAR[tensor.dtype])


def change(boxes):
    for box in boxes:
        if box is not None and box.tensor.dtype in INTEGERS:
            box.tensor.copy_(far(box.tensor))


@pytest.mark.parametrize("case", EACH)
def test_backward(case):
    trial = Trial(case, dtype_of(case))
    plan = trial.plan(True)
    if not any(plan.input_grads):
        pytest.skip("no gradient")
    given = [Box(trial.tensors[i].dtype, trial.tensors[i].shape, trial.tensors[i]) for i in trial.fed]
    arena, outputs = Box(torch.uint8, (plan.arena_bytes,)), made(plan.outputs)
    writes, grads = made(spec for _, spec in plan.writes), made(plan.input_grads)
    calls = trial.session.calls()
    memory = arena.tensor, tensors_of(given), tensors_of(outputs)
    plan.forward(*memory, tensors_of(writes), 0, calls)
    change(given)
    change(outputs)
    dys = [
        Box(dy.dtype, dy.shape, dy).tensor if spec else None
        for spec, dy in zip(plan.output_grads, trial.dys, strict=True)
    ]
    try:
        plan.backward(*memory, dys, tensors_of(grads), 0, calls)
    except _core.Error as error:
        assert "out of range" in str(error) or "a sequence of length" in str(error)
    else:
        for i, grad in zip(trial.fed, tensors_of(grads), strict=True):
            if i in trial.wrt:
                trial.check_gradient_of(i, grad, trial.expected.grads[i], sees=True)
    assert all(box.fenced() for box in [arena, *outputs, *filter(None, grads)]), "memory beyond a tensor was written"


def run(trial, tensors):
    """Forward by the plan that was made for the trial's own tensors."""
    plan = trial.plan(False)
    given = [Box(tensors[i].dtype, tensors[i].shape, tensors[i]) for i in trial.fed]
    boxes = [arena := Box(torch.uint8, (plan.arena_bytes,)), *(outputs := made(plan.outputs))]
    try:
        plan.forward(arena.tensor, tensors_of(given), tensors_of(outputs), [], 0, trial.session.calls())
    finally:
        assert all(box.fenced() for box in boxes), "memory beyond a tensor was written"


@pytest.mark.parametrize("case", [c for c in FAMILIES["nonzero"] if not c.const], ids=lambda c: c.label)
@pytest.mark.parametrize("value", [0, 1])
def test_counted_before(case, value):
    """A size is found in one run, and filled in another."""
    trial = Trial(case, case.dtypes[0])
    tensors = [torch.full_like(t, value) for t in trial.tensors]
    if all(torch.equal(a != 0, b != 0) for a, b in zip(tensors, trial.tensors, strict=True)):
        return
    if trial.plan(False).nodes == (0, 0):
        return
    with pytest.raises(_core.Error, match="were counted before"):
        run(trial, tensors)


def test_each_place_is_of_one_kind():
    for row in _core.operators():
        assert not row["checked"] & row["owned"] | row["checked"] & row["plain"] | row["owned"] & row["plain"], row


def test_every_kernel_with_places_is_reached():
    """By a case above, or by the passes' tests that are named here, whose rows are the engine's own."""
    reached = set()
    for parameters in EACH:
        (case,) = parameters.values
        plan = Trial(case, dtype_of(case)).plan(True)
        reached |= {row[0] for row in plan.code()}
    by_passes = {  # tests/passes/test_rows.py, test_linear_loss.py, test_passes.py
        "PackRows", "UnpackRows", "DropoutTrain", "FusedAttention", "FusedAttentionGrad", "EmbeddingNorm",
        "LinearCrossEntropy", "LinearCrossEntropyGrad", "GatherGradAdd",
    }  # fmt: skip
    constants = {"Interpolate", "NonZeroSized"}  # of tables that the engine makes; test_counted_before
    places = {row["name"] for row in _core.operators() if row["has_kernel"] and row["checked"] | row["owned"]}
    assert places - reached - by_passes - constants == set()


def test_indices_are_counted():
    """benchmarks/checks.py reads from a plan how many indices its kernels check."""
    text = (
        "input %0 table float32[9, 4] grad\ninput %1 ids int64[2, 3]\ninput %2 labels int64[6]\ninput %9 dy float32[]\n"
        "%3 = Gather(%0 table, %1 ids, axis=0) float32[2, 3, 4]\n"
        "%4 = Reshape(%3, [6, 4], allowzero=1) float32[6, 4]\n"
        '%5, %6, %7 = CrossEntropy(%4, %2 labels, reduction="mean", ignore_index=-100) float32[], float64[6]\n'
        "backward\n"
        "%8 = GatherGrad(%3, %1 ids, axis=0, shape=[9, 4]) float32[9, 4]\n"
    )
    assert index_counts(text) == {"Gather": 6, "CrossEntropy": 6, "GatherGrad": 6}
