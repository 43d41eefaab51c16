"""Kernels on an emulated GPU compute what those on the CPU do: random numbers, and results over many rows."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortmodule import _core
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.ops.cases import FLOAT, Case, t, value
from tests.ops.harness import ONNX_TYPE, Trial
from tests.ops.test_random import FLOATS, session

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
SIZES = [0, 1, 63, 64, 65, 257, 512, 513, 1024, 1025, 5000]


@contextlib.contextmanager
def on_cpu():
    with mock.patch("ortmodule.engine.session.gpu_of", lambda tensors: None):
        yield


def drawn(nodes, inputs, dtype, tensors, kind=None):
    """What nodes draw on the GPU, and on the CPU."""
    found = []
    for place in (contextlib.nullcontext, on_cpu):
        with place():
            model = session(nodes, inputs, {"y": kind or ONNX_TYPE[dtype]}, dtype)
            found.append(model.run(tensors, [False] * len(tensors), seed=2**40 + 7).outputs[0])
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["RandomUniform", "RandomNormal"])
def test_numbers_are_those_of_the_cpu(driver, op, dtype):  # noqa: F811
    attrs = {"low": -1.5, "high": 2.0} if op == "RandomUniform" else {"mean": 0.5, "scale": 2.0}
    for size in SIZES:
        node = helper.make_node(op, ["x"], ["y"], name="n", dtype=ONNX_TYPE[dtype], **attrs)
        node.op_type += "Like"
        driver.fake_fail_at(0)
        there, here = drawn([node], {"x": 1}, dtype, [torch.zeros(size, dtype=dtype)])
        assert size == 0 or driver.fake_calls() > 0
        tolerance = torch.finfo(dtype).eps * 8
        torch.testing.assert_close(there, here, rtol=tolerance, atol=tolerance)
    assert not size or there.unique().numel() > (40 if dtype == torch.bfloat16 else 500)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(5, 1), (7, 47), (2, 3, 64), (9, 65), (3, 200), (2, 2100), (300, 16)], ids=str)
def test_dropout_within_a_softmax_drops_what_the_cpu_drops(driver, shape, masked, dtype):  # noqa: F811
    """Where it is two operators for 16-bit floats; over and over, so that the last steps are recorded ones."""
    generator = torch.Generator().manual_seed(shape[-1])
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    allowed = torch.rand(shape, generator=generator) < 0.7
    constants = [("ratio", torch.tensor(0.4)), ("training", torch.tensor(True)), ("allowed", allowed)]
    nodes = [helper.make_node("MaskedSoftmax", ["x", "allowed"], ["p"], domain="ortmodule")]
    if not masked:
        nodes = [helper.make_node("Softmax", ["x"], ["p"], axis=-1)]
    nodes.append(helper.make_node("Dropout", ["p", "ratio", "training"], ["y"]))
    there, here = (session(nodes, {"x": x.dim()}, {"y": ONNX_TYPE[dtype]}, dtype, constants) for _ in range(2))
    tolerance = torch.finfo(dtype).eps * 8
    for seed in range(5):
        run = there.run([x], [True], [True], seed=seed)
        found = [run.outputs[0], *run.backward([dy])]
        with on_cpu():
            run = here.run([x], [True], [True], seed=seed)
            expected = [run.outputs[0], *run.backward([dy])]
        assert torch.equal(found[0] == 0, expected[0] == 0)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    (plan,) = there.plans.values()
    names = [code[0] for code in plan.code()]
    assert names[-1] == "SoftmaxDropoutGrad" and names[-2].endswith("SoftmaxDropout")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("result", ["float32", "float16", "int64", "int32", "int16", "uint8", "bool"])
def test_bernoulli_draws_those_of_the_cpu(driver, dtype, result):  # noqa: F811
    kind = ONNX_TYPE[getattr(torch, result)]
    for size in SIZES:
        p = torch.rand(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        node = helper.make_node("Bernoulli", ["x"], ["y"], name="n", dtype=kind)
        there, here = drawn([node], {"x": 1}, dtype, [p], kind)
        assert there.dtype == getattr(torch, result) and torch.equal(there, here)
    assert 0.4 < there.double().mean() < 0.6


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("classes", [1, 2, 7, 127, 128, 129, 1000])
def test_multinomial_draws_those_of_the_cpu(driver, rows, classes, dtype):  # noqa: F811
    x = torch.randn(rows, classes, generator=torch.Generator().manual_seed(classes)).to(dtype) * 2
    x[:, ::3] = float("-inf")
    x[:, classes // 2] = 0
    for kind in (TensorProto.INT64, TensorProto.INT32):
        node = helper.make_node("Multinomial", ["x"], ["y"], name="n", dtype=kind, sample_size=77)
        there, here = drawn([node], {"x": 2}, dtype, [x], kind)
        assert torch.equal(there, here)


def test_what_is_no_probability_is_reported(driver):  # noqa: F811
    node = helper.make_node("Multinomial", ["x"], ["y"], name="n", dtype=TensorProto.INT64, sample_size=3)
    model = session([node], {"x": 2}, {"y": TensorProto.INT64})
    x = torch.zeros(4, 5)
    for bad in (float("nan"), float("inf")):
        wrong = x.clone()
        wrong[2, 1] = bad
        with pytest.raises(_core.Error, match="row 2 of Multinomial's operand holds no log probabilities"):
            model.run([wrong], [False])
    with pytest.raises(_core.Error, match="row 0 of Multinomial's operand holds no log probabilities"):
        model.run([torch.full((1, 5), float("-inf"))], [False])
    assert model.run([x], [False]).outputs[0].shape == (4, 3)


@pytest.mark.parametrize("lengths", [[0, 5, 2], [-1, 3, 1], [6, 1, 1]])
def test_lengths_that_cannot_be_are_reported(driver, lengths):  # noqa: F811
    node = helper.make_node("ReverseSequence", ["x", "n"], ["y"], batch_axis=1, time_axis=0)
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info("x", 1, [None, None]), helper.make_tensor_value_info("n", 7, [None])],
        [helper.make_tensor_value_info("y", 1, None)],
    )  # fmt: skip
    from ortmodule.engine.session import Session

    model = Session(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    )
    x = torch.arange(15.0).reshape(5, 3)
    if min(lengths) < 0 or max(lengths) > 5:
        with pytest.raises(_core.Error, match=rf"a sequence of length {lengths[0]} in 5 steps"):
            model.run([x, torch.tensor(lengths)], [False, False])
    else:
        (y,) = model.run([x, torch.tensor(lengths)], [False, False]).outputs
        expected = x.clone()
        for i, n in enumerate(lengths):
            expected[:n, i] = x[:n, i].flip(0)
        assert torch.equal(y, expected)


# --- rows that matter, and elements that are not 0 --------------------------------------------------------------------


def same(case, dtype, shift=0):
    """Outputs and gradients of both, up to the order of sums."""
    trial = Trial(case, dtype, shift=shift)
    there = trial.run(training=True)
    trial.check_forward(there)
    with on_cpu():
        here = trial.run(training=True)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype in ("bfloat16", "float16") else {"rtol": 1e-4, "atol": 1e-4}
    for a, b in zip([*there.outputs, *there.grads], [*here.outputs, *here.grads], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
    return trial


@given(data=st.data())
def test_rows_are_those_of_the_cpu(data):
    rows = data.draw(st.sampled_from([1, 2, 31, 100, 511, 512, 513, 1537]), label="rows")
    width = data.draw(st.sampled_from([1, 2, 3, 5, 8, 33]), label="width")
    some = data.draw(st.sampled_from([0.0, 0.01, 0.3, 0.97, 1.0]), label="part that is labelled")
    dtype = data.draw(st.sampled_from(FLOAT), label="dtype")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    labels = torch.randint(0, 4, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) >= some] = 7

    def ref(x, w, i):
        return F.cross_entropy(x @ w, i, ignore_index=7, reduction="sum")

    attrs = {"ignore_index": 7, "reduction": "sum"}
    case = Case(
        "SoftmaxCrossEntropyLoss", [t(rows, width), t(width, 4), value(labels.tolist(), "int64")], ref, resize=False,
        nodes=[("MatMul", "x0 x1", "scores"), ("SoftmaxCrossEntropyLoss", "scores x2", "y0", attrs)],
        dtypes=FLOAT, opset=13,
    )  # fmt: skip
    same(case, dtype, data.draw(st.sampled_from([0, 1]), label="shift"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_losses_of_logits_that_are_not_finite(driver, dtype):  # noqa: F811
    """Each thread scales what it has added up where it meets a larger logit, and a block what its threads have."""
    classes = 9000  # more than a block has at a time
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, classes, generator=generator).to(getattr(torch, dtype))
    x[0] = x[0].sort().values * 20  # a larger one in each piece
    x[1] = x[1].sort(descending=True).values * 20
    x[2, :8500] = -torch.inf
    x[3, 100:] = -torch.inf
    x[4] = -torch.inf
    x[5, 8999], x[6, 3], x[7, 0] = torch.nan, torch.inf, -torch.inf
    x[8, :] = -torch.inf
    x[8, 7] = torch.nan
    labels = [0, 8999, 8999, 99, 5, 1, 4, 0, 7]

    def ref(x, i):
        return F.cross_entropy(x, i, reduction="none")

    case = Case(
        "SoftmaxCrossEntropyLoss", [t(9, classes), value(labels, "int64")], ref, resize=False, opset=13,
        dtypes=("float32", "float64", "bfloat16"), attrs={"reduction": "none"},
    )  # fmt: skip
    ours = Trial(case, dtype, [x, torch.tensor(labels)]).run(training=True)
    leaf = x.double().requires_grad_()
    exact = ref(leaf, torch.tensor(labels))
    tolerance = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2}[dtype]
    torch.testing.assert_close(ours.outputs[0].double(), exact.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    (slope,) = torch.autograd.grad(exact, leaf, Trial(case, dtype, [x, torch.tensor(labels)]).dys[0].double())
    torch.testing.assert_close(ours.grads[0].double(), slope, rtol=tolerance, atol=tolerance, equal_nan=True)


@given(data=st.data())
def test_elements_that_are_not_zero_are_those_of_the_cpu(data):
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 17, 65]), min_size=1, max_size=3), label="shape")
    dtype = data.draw(st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "int16", "uint8", "bool"]))
    some = data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]), label="part that is not 0")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    x = (torch.rand(shape, generator=generator) < some).to(getattr(torch, dtype))
    case = Case("NonZero", [t(*shape)], lambda x: x.nonzero().T, dtypes=(dtype,), grad=False)
    trial = Trial(case, dtype, [x], shift=data.draw(st.sampled_from([0, 1]), label="shift"))
    trial.check_forward()
    with on_cpu():
        trial.check_forward()


# --- sums by place ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "count"), [(1, 300), (2, 1), (255, 2048), (256, 2049), (70_000, 5000), (2, 20_000)])
def test_gradients_of_gathered_rows(driver, rows, count):  # noqa: F811
    """Of more indices than a block sorts, by more than a digit, most of them of few rows, of which one has more parts
    than a block has threads; to the last bit, twice."""
    generator = torch.Generator().manual_seed(count)
    index = torch.randint(-rows, rows, (count,), generator=generator)
    index[torch.rand(count, generator=generator) < 0.5] = rows // 2
    case = Case("Gather", [t(rows, 3), value(index.tolist(), "int64")], lambda x, i: x[i], resize=False)
    for dtype in ("float32", "bfloat16"):
        trial = Trial(case, dtype, shift=1)
        first, again = trial.run(training=True).grads[0], trial.run(training=True).grads[0]
        assert torch.equal(first, again)
        dy = trial.dys[0].double()
        exact = torch.zeros(rows, 3, dtype=torch.float64).index_add(0, index % rows, dy)
        error = 4e-6 if dtype == "float32" else 4e-3
        scale = torch.zeros(rows, 3, dtype=torch.float64).index_add(0, index % rows, dy.abs())
        assert ((first.double() - exact).abs() <= error * scale).all()


def test_images_sampled_often_at_one_pixel(driver):  # noqa: F811
    """Many points of two images at the same place, and beyond the borders."""
    points = 250
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = torch.randn(2, points, 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grid[0, : points // 2] = 0.1
    grid[1, ::3] = 50.0
    for padding in ("zeros", "border", "reflection"):
        for mode in ("cubic", "linear", "nearest"):

            def ref(x, grid, mode=mode, padding=padding):
                name = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}[mode]
                return F.grid_sample(x, grid, mode=name, padding_mode=padding, align_corners=False)

            case = Case(
                "GridSample", [t(2, 3, 5, 4), t(2, points, 1, 2, grad=False)], ref, opset=20, resize=False,
                attrs={"mode": mode, "padding_mode": padding, "align_corners": 0},
            )  # fmt: skip
            trial = Trial(case, "float64", [x, grid])
            trial.check_forward()
            trial.check_gradient()


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize(
    "ends", [[0, 0, 0], [200, 200, 200], [3, 67, 195], [64, 128, 150], [150, 20, 400], [-5, 90, 7]]
)
def test_groups_of_any_lengths(driver, ends, kind):  # noqa: F811
    """Empty, longer than a tile, ending before they begin or behind the last row: as on the CPU."""
    rows = 199

    def ref(a, b, _):
        y, begin = a.new_zeros(rows, b.shape[2]), 0
        parts = []
        for e, end in enumerate(ends):
            end = min(max(end, begin), rows)
            parts.append(a[begin:end] @ b[e])
            begin = end
        return torch.cat([*parts, y[begin:]])

    case = Case(
        "ortmodule::GroupedMatMul", [t(rows, 70), t(3, 70, 65), value(ends, kind)], ref, resize=False,
    )  # fmt: skip
    for dtype in ("float64", "float32", "float16"):
        trial = Trial(case, dtype, shift=1)
        trial.check_forward()
        if dtype == "float64":
            trial.check_gradient()
