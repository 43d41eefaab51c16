"""Convolutions by cuDNN (csrc/cuda/libraries/dnn.c), on a library of ours that convolves on the CPU (fake_dnn.c)."""

import copy
import warnings

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core, explain
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import Cached
from tests.cuda.test_products import said_without

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")


@pytest.fixture
def dnn(driver):  # noqa: F811
    fake = library("libcudnn.so.9")
    yield fake
    fake.fake_dnn_refuse(0)


def step(model, x):
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


def compare(model, x, **tolerances):
    """A step in the engine and one in PyTorch; returns the engine's module."""
    eager, ours = model, ORTModule(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = step(ours, x)
    torch.testing.assert_close(found, step(eager, x), **tolerances)
    return ours


CASES = [
    (nn.Conv1d(3, 4, 5, padding=2), (2, 3, 9)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 8, 7)),
    (nn.Conv2d(3, 5, (2, 3), dilation=(2, 1), bias=False), (3, 3, 7, 6)),
    (nn.Conv3d(2, 3, 2, padding=(1, 0, 1)), (2, 2, 3, 4, 5)),
    (nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), (2, 3, 5, 4)),
]


@pytest.mark.parametrize(("model", "shape"), CASES, ids=[type(m).__name__ + str(i) for i, (m, _) in enumerate(CASES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_library_computes_all_three_products(dnn, model, shape, dtype):
    torch.manual_seed(0)
    before, x = dnn.fake_dnn_products(), torch.randn(shape, dtype=dtype).requires_grad_()
    ours = compare(nn.Sequential(copy.deepcopy(model), nn.Tanh()).to(dtype), x)
    assert dnn.fake_dnn_products() - before >= 3 and not explain(ours).aten_ops


@pytest.mark.parametrize(("model", "shape"), CASES, ids=[type(m).__name__ + str(i) for i, (m, _) in enumerate(CASES)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_types_stay_narrow(dnn, model, shape, dtype, autocast):
    """The module's own type, and autocast's: all three products are the library's, as near to float64 as their type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), copy.deepcopy(model)).to(dtype)
    exact, x = copy.deepcopy(model).double(), torch.randn(shape).to(dtype)
    expected = step(exact, x.double().requires_grad_())
    ours = ORTModule(model.float() if autocast else model)
    before, narrow = dnn.fake_dnn_products(), dnn.fake_dnn_narrow()
    with torch.autocast("cpu", dtype, enabled=autocast), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = step(ours, (x.float() if autocast else x).requires_grad_())
    assert not explain(ours).aten_ops
    assert dnn.fake_dnn_narrow() - narrow == dnn.fake_dnn_products() - before >= 3
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.double() - theirs).abs().max() <= 2e-2 * theirs.abs().max()


def test_a_network(dnn):
    """Convolutions, batch norm and pools: nothing is left to PyTorch."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    ours = compare(nn.Sequential(*body, nn.Linear(8, 5)), torch.randn(4, 3, 16, 12), rtol=1e-4, atol=1e-4)
    assert explain(ours).captured and not explain(ours).aten_ops


def test_a_step_is_recorded(dnn, driver, monkeypatch):  # noqa: F811
    """As a CUDA graph, of forward and of backward; replays read what lies in the input and the weights then."""
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    ours, x, before = ORTModule(copy.deepcopy(eager)), torch.randn(2, 2, 5, 6), driver.fake_graphs()
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in (ours, eager)]
    for _ in range(5):
        results = []
        for model, optimizer in zip((ours, eager), optimizers, strict=True):
            optimizer.zero_grad()
            results.append(step(model, x))
            optimizer.step()
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert driver.fake_graphs() >= before + 2


def test_what_the_library_does_not_take_is_pytorchs(dnn):
    """Other padding on one side than on the other, which the library has no word for; and whatever it refuses."""
    torch.manual_seed(0)
    before = dnn.fake_dnn_products()
    compare(nn.Sequential(nn.Conv2d(3, 4, 4, padding="same"), nn.Tanh()), torch.randn(2, 3, 6, 6))
    assert dnn.fake_dnn_products() == before
    dnn.fake_dnn_refuse(1)
    compare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()), torch.randn(2, 3, 6, 5))
    assert dnn.fake_dnn_products() == before


def test_tf32_is_torchs_setting(dnn):
    """Convolutions have one of their own."""
    setting = torch.backends.cudnn.conv
    now = setting.fp32_precision
    try:
        for precision, rounded in (("ieee", 0), ("tf32", 2)):
            setting.fp32_precision = precision
            before = dnn.fake_dnn_rounded()
            compare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()), torch.randn(2, 3, 7, 6))
            assert (dnn.fake_dnn_rounded() > before) == (rounded > 0)
            compare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()).double(), torch.randn(2, 3, 7, 6).double())
    finally:
        setting.fp32_precision = now


def test_every_call_may_fail(dnn, driver):  # noqa: F811
    """Out of memory or PyTorch's result, nothing is held, and the next step is right."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh()), torch.randn(2, 3, 7, 7)
    expected = step(copy.deepcopy(model), x)
    step(ORTModule(copy.deepcopy(model)), x)  # handles stay
    calls = FailingCalls(driver)
    for attempt in calls:
        ours = ORTModule(copy.deepcopy(model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with attempt:
                torch.testing.assert_close(step(ours, x), expected)
            if attempt.error:
                ours.zero_grad()
                torch.testing.assert_close(step(ours, x), expected)
    assert calls.failures > 3


def test_no_library(tmp_path):
    """A sentence that names it; PyTorch convolves, and the rest stays with the engine."""
    said = said_without(tmp_path, "libcudnn.so.9", "", "torch.nn.Conv2d(3, 2, 3)", "4, 3, 5, 5")
    assert "there is no cuDNN: libcudnn.so.9 was not found" in said
