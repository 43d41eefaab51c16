"""Batch norm and average pools run by cuDNN, and by our kernels where it does not take them.

On a library of ours that computes on the CPU (fake_dnn_norms.c): dnn_batchnorm.c, dnn_pool.c.
"""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, _core, explain
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_convolutions import dnn  # noqa: F401  (a fixture)
from tests.cuda.test_emulated import driver, session  # noqa: F401  (a fixture)
from tests.cuda.test_products import said_without

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
#: Of gradients and values that are sums over a few hundred elements, rounded once.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def step(model, x):
    """What a step leaves: values, gradients, and the module's buffers."""
    x = x.detach().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *gradients, *(b.double() for b in model.buffers())]


def compare(model, x, steps=2):
    """Steps in the engine and in float64 by PyTorch; returns the engine's module."""
    exact, ours = copy.deepcopy(model).double(), ORTModule(model)
    for _ in range(steps):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*PyTorch runs")
            found = step(ours, x)
        expected = step(exact, x.double())
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            near = TOLERANCES[x.dtype] * theirs.abs().amax().clamp_min(1e-3) if theirs.numel() else 0
            assert (mine.double() - theirs).abs().le(near).all()
        ours.zero_grad()
        exact.zero_grad()
    assert explain(ours).captured and not explain(ours).aten_ops
    return ours


class Calls:
    """Batch norms and pools that the library has computed since this was made."""

    def __init__(self, fake):
        self.dnn, self.before = fake, (fake.fake_dnn_norms(), fake.fake_dnn_pools())

    def norms(self):
        return self.dnn.fake_dnn_norms() - self.before[0]

    def pools(self):
        return self.dnn.fake_dnn_pools() - self.before[1]


# --- batch norm ------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """A batch norm behind something that wants a gradient, with parameters that are neither 1 nor 0."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        for p in norm.parameters():
            nn.init.uniform_(p, 0.5, 1.5)

    def forward(self, x):
        return self.norm(x * 2).tanh()


NORMS = [
    (nn.BatchNorm2d(5), (4, 5, 6, 3)),
    (nn.BatchNorm1d(4), (9, 4)),
    (nn.BatchNorm1d(4), (3, 4, 7)),
    (nn.BatchNorm3d(3), (2, 3, 2, 3, 4)),
    (nn.BatchNorm2d(5, eps=0.25, momentum=0.3), (4, 5, 6, 3)),
    (nn.BatchNorm2d(5, affine=False), (4, 5, 6, 3)),
    (nn.BatchNorm2d(5, track_running_stats=False), (4, 5, 6, 3)),
    (nn.BatchNorm2d(1), (16, 1, 1, 1)),
]
NORM_IDS = [f"{type(m).__name__}{i}" for i, (m, _) in enumerate(NORMS)]


def parts(norm, shape, dtype):
    """The norm as it is beside x of this type, and x. A norm of 16 bits has parameters of float32, as in autocast."""
    torch.manual_seed(0)
    norm = Norm(copy.deepcopy(norm))
    return norm.double() if dtype == torch.float64 else norm, torch.randn(shape).to(dtype)


@pytest.mark.parametrize(("norm", "shape"), NORMS, ids=NORM_IDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm(dnn, norm, shape, dtype):  # noqa: F811
    """Forward and backward are the library's, the running moments PyTorch's."""
    norm, x = parts(norm, shape, dtype)
    called = Calls(dnn)
    compare(norm, x)
    # Without parameters there are constants, of x's type.
    assert called.norms() >= 4 or (not norm.norm.affine and x.itemsize == 2 and called.norms() == 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm_in_evaluation(dnn, dtype):  # noqa: F811
    """Forward is the library's where the moments have its type; of the gradient it knows nothing."""
    norm, x = parts(nn.BatchNorm2d(5, eps=0.1), (4, 5, 6, 3), dtype)
    norm.norm.running_mean.uniform_(-1, 1)
    norm.norm.running_var.uniform_(0.5, 2)
    called = Calls(dnn)
    compare(norm.eval(), x, steps=1)
    forward = called.norms()
    assert forward >= 1
    compare(norm.eval(), x, steps=3)
    assert called.norms() - forward == forward + 2


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]], ids="+".join)
def test_gradients_that_are_not_wanted(dnn, frozen):  # noqa: F811
    norm, x = parts(*NORMS[0], torch.float32)
    for name in frozen:
        getattr(norm.norm, name).requires_grad_(False)
    called = Calls(dnn)
    compare(norm, x)
    assert called.norms() >= 4


def test_operands_need_no_gradient(dnn):  # noqa: F811
    """The library has no gradients of the parameters alone: these are our kernel's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm2d(3), nn.Tanh()), torch.randn(4, 3, 5, 2)
    ours, called = ORTModule(copy.deepcopy(model)), Calls(dnn)
    for each in (ours, model):
        each(x).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    before = called.norms()
    ours(x)
    assert before >= 1 and called.norms() == before + 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_constant_channel(dnn, dtype):  # noqa: F811
    """The variance is 0: epsilon alone keeps the result finite."""
    norm, x = parts(nn.BatchNorm2d(3), (4, 3, 5, 2), dtype)
    x[:, 1] = 0.5
    called = Calls(dnn)
    compare(norm, x)
    assert called.norms() >= 4


def test_small_variances_are_not_lost(dnn):  # noqa: F811
    """Far below epsilon, which the library's own inverse could not tell from 0."""
    norm, x = parts(nn.BatchNorm2d(3, momentum=1.0), (4, 3, 5, 2), torch.float32)
    ours, called = ORTModule(norm), Calls(dnn)
    x *= 1e-6
    ours(x)
    expected = (2 * x.double()).transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(norm.norm.running_var.double(), expected, rtol=1e-4, atol=0)
    assert called.norms() >= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_ours(dnn, dtype):  # noqa: F811
    norm, x = parts(*NORMS[0], dtype)
    called = Calls(dnn)
    compare(norm.to(dtype), x, steps=1)
    assert called.norms() == 0


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (4, 3, 0, 2), (4, 0, 2, 2)])
@pytest.mark.parametrize("training", [0, 1])
def test_nothing_is_no_work_of_the_librarys(dnn, shape, training):  # noqa: F811
    operands = {"x": ("float32", 4)} | {name: ("float32", 1) for name in ("scale", "bias", "mean", "variance")}
    results = "y moved_mean moved_variance" if training else "y"
    rows = [("BatchNormalization", " ".join(operands), results, {"training_mode": training})]
    called = Calls(dnn)
    found = session(rows, operands, ("y", "float32", 4)).run(
        [torch.randn(shape)] + [torch.ones(shape[1])] * 4, [False] * 5
    )
    assert found.outputs[0].shape == shape and called.norms() == 0


def test_too_many_images_are_ours(dnn):  # noqa: F811
    norm, x = parts(nn.BatchNorm1d(3), (65537, 3), torch.float32)
    ours = compare(norm, x, steps=1)
    called = Calls(dnn)
    step(ours, x)
    assert called.norms() == 0


# --- pools -----------------------------------------------------------------------------------------------------------

POOLS = [
    (nn.AvgPool2d(3), (2, 3, 9, 6)),
    (nn.AvgPool2d(3, stride=2, padding=1), (2, 3, 8, 7)),
    (nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), (2, 3, 8, 7)),
    (nn.AvgPool2d((2, 3), stride=(1, 2), padding=(0, 1)), (3, 2, 5, 6)),
    (nn.AvgPool2d(2, ceil_mode=True), (2, 3, 6, 4)),
    (nn.AvgPool1d(4, stride=3, padding=2), (2, 3, 11)),
    (nn.AvgPool3d(2, padding=1, count_include_pad=False), (2, 2, 3, 4, 5)),
]


class Pool(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x * 2).tanh()


@pytest.mark.parametrize(("pool", "shape"), POOLS, ids=[f"{type(m).__name__}{i}" for i, (m, _) in enumerate(POOLS)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_average_pool(dnn, pool, shape, dtype):  # noqa: F811
    if len(shape) == 5 and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("PyTorch has none on a CPU")
    torch.manual_seed(0)
    called = Calls(dnn)
    compare(Pool(pool), torch.randn(shape).to(dtype))
    assert called.pools() >= 4


def test_an_average_hides_no_nan(dnn):  # noqa: F811
    x = torch.randn(2, 3, 6, 4)
    x[1, 2, 3, 1] = torch.nan
    ours, called = ORTModule(Pool(nn.AvgPool2d(2))), Calls(dnn)
    torch.testing.assert_close(ours(x), Pool(nn.AvgPool2d(2))(x), equal_nan=True)
    assert called.pools() >= 1


OURS = [
    (nn.AvgPool2d(2, stride=2, ceil_mode=True), (2, 3, 7, 5)),
    (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (2, 3, 8, 6)),
    (nn.MaxPool2d(3, stride=2, padding=1), (2, 3, 8, 7)),
    (nn.MaxPool3d(2), (2, 3, 4, 4, 6)),
]


@pytest.mark.parametrize(("pool", "shape"), OURS, ids=[f"{type(m).__name__}{i}" for i, (m, _) in enumerate(OURS)])
def test_pools_of_ours(dnn, pool, shape):  # noqa: F811
    """Windows that hang over the end, and every maximum."""
    torch.manual_seed(0)
    called = Calls(dnn)
    compare(Pool(pool), torch.randn(shape), steps=1)
    assert called.pools() == 0


@pytest.mark.parametrize(
    ("attributes", "padded", "is_librarys"),
    [
        ({"pads": [1, 0, 1, 0]}, (0, 0, 1, 1), True),
        ({"pads": [1, 0, 0, 1]}, (0, 1, 1, 0), False),
        ({"pads": [2, 0, 2, 0]}, (0, 0, 2, 2), False),
        ({"dilations": [1, 2]}, None, False),
    ],
)
def test_windows_that_only_onnx_has(dnn, attributes, padded, is_librarys):  # noqa: F811
    """Padding on one side, padding as wide as the window, dilation."""
    attributes = {"kernel_shape": [2, 2], "count_include_pad": 1, **attributes}
    s = session([("AveragePool", "x", "y", attributes)], {"x": ("float32", 4)}, ("y", "float32", 4))
    x, called = torch.randn(2, 3, 6, 5), Calls(dnn)
    found = s.run([x], [False]).outputs[0]
    expected = F.avg_pool2d(F.pad(x, padded), 2, stride=1) if padded else None
    if not padded:
        expected = (x[:, :, :-1, :-2] + x[:, :, 1:, :-2] + x[:, :, :-1, 2:] + x[:, :, 1:, 2:]) / 4
    torch.testing.assert_close(found, expected)
    assert (called.pools() > 0) == is_librarys


def test_no_images(dnn):  # noqa: F811
    s = session([("AveragePool", "x", "y", {"kernel_shape": [2, 2]})], {"x": ("float32", 4)}, ("y", "float32", 4))
    called = Calls(dnn)
    assert s.run([torch.randn(0, 3, 6, 5)], [False]).outputs[0].shape == (0, 3, 5, 4) and called.pools() == 0


# --- the library -----------------------------------------------------------------------------------------------------


def both():
    """A norm, an average and a maximum."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), nn.BatchNorm2d(3), nn.AvgPool2d(2), nn.MaxPool2d(2)), torch.randn(4, 3, 9, 8)


def test_steps_that_are_recorded(dnn):  # noqa: F811
    """Some steps of the same shapes, most of them CUDA graphs: each has the library's work in it."""
    model, x = both()
    ours, called = compare(model, x, steps=2), Calls(dnn)
    for n in range(1, 6):
        step(ours, x)
        assert (called.norms(), called.pools()) == (2 * n, 2 * n)


def test_a_plan_has_told_the_library_of_backward(dnn, driver):  # noqa: F811
    """Nothing is described when backward runs."""
    model = nn.Sequential(nn.Tanh(), nn.BatchNorm2d(6), nn.AvgPool2d((2, 3)))
    called, y = Calls(dnn), ORTModule(model)(torch.randn(5, 6, 8, 9).requires_grad_())
    held = driver.fake_held()
    before = called.norms(), called.pools()
    y.sum().backward()
    assert driver.fake_held() == held
    assert (called.norms(), called.pools()) == (before[0] + 1, before[1] + 1)


def test_what_the_library_refuses_is_ours(dnn):  # noqa: F811
    """It is asked once for each way, not at each step."""
    model = nn.Sequential(nn.Tanh(), nn.BatchNorm2d(7), nn.AvgPool2d((3, 2)))
    called, before, x = Calls(dnn), dnn.fake_dnn_asked(), torch.randn(3, 7, 9, 8)
    dnn.fake_dnn_refuse(1)
    ours = compare(model, x, steps=1)
    asked = dnn.fake_dnn_asked()
    assert asked - before >= 4
    for _ in range(3):
        step(ours, x)
    assert (called.norms(), called.pools()) == (0, 0) and dnn.fake_dnn_asked() == asked


def test_a_window_that_the_library_cannot_have_is_ours(dnn):  # noqa: F811
    """It says so when it is told of it, before anything is started."""
    called, before = Calls(dnn), dnn.fake_dnn_asked()
    compare(Pool(nn.AvgPool1d(300, padding=5)), torch.randn(2, 3, 610), steps=1)
    assert called.pools() == 0 and dnn.fake_dnn_asked() > before


@pytest.mark.emulated_full
def test_every_call_may_fail(dnn, driver):  # noqa: F811
    """Out of memory, and the next step is right."""
    model, x = both()
    expected = step(copy.deepcopy(model), x)
    calls = FailingCalls(driver)
    for attempt in calls:
        ours = ORTModule(copy.deepcopy(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with attempt:
                torch.testing.assert_close(step(ours, x), expected, rtol=1e-4, atol=1e-5)
            if attempt.error:
                again = ORTModule(copy.deepcopy(model))
                torch.testing.assert_close(step(again, x), expected, rtol=1e-4, atol=1e-5)
    assert calls.failures > 8


MODULE = "torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.AvgPool2d(2))"


def without(function):
    """The text of a library that lacks a function."""
    files = [Path(__file__).with_name(name).resolve() for name in ("fake_dnn.c", "fake_dnn_norms.c")]
    return f"#define {function} absent\n" + "".join(f'#include "{file}"\n' for file in files)


def test_no_library(tmp_path):
    """Nothing is said, and nothing is PyTorch's."""
    assert said_without(tmp_path, "libcudnn.so.9", "", MODULE, "4, 3, 5, 5").strip() == ""


@pytest.mark.parametrize("name", ["cudnnPoolingBackward", "cudnnBatchNormalizationBackward"])
def test_a_function_that_is_missing_takes_nothing_else_away(tmp_path, name):
    module = f"torch.nn.Sequential(torch.nn.Conv2d(3, 3, 2), {MODULE})"
    assert said_without(tmp_path, "libcudnn.so.9", without(name), module, "4, 3, 6, 6").strip() == ""


def test_norms_and_pools_need_no_convolutions(tmp_path):
    poor = without("cudnnConvolutionForward")
    module = f"torch.nn.Sequential(torch.nn.Conv2d(3, 3, 2), {MODULE})"
    said = said_without(tmp_path, "libcudnn.so.9", poor, module, "4, 3, 6, 6")
    assert "the cuDNN is too old: libcudnn.so.9 has no cudnnConvolutionForward" in said
    assert "BatchNorm" not in said and "Pool" not in said
