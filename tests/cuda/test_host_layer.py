"""The host layer (driver.c) works without a driver, without memory, which is torch's to give, and without waiting.

A step in which no size follows from data never waits.
"""

import copy
import gc

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from ortmodule.engine import session
from tests.cuda.test_emulated import DRY, driver, gpt2, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import Cached
from tests.cuda.test_products import said_without

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

POOR = "int cuInit(unsigned flags) { return flags != 0; }"


@pytest.mark.parametrize(
    "poor, sentence",
    [
        ("", "there is no NVIDIA driver: libcuda.so.1 was not found"),
        (POOR, "the NVIDIA driver is too old: libcuda.so.1 has no cuGetErrorString"),
    ],
    ids=["none", "old"],
)
def test_no_driver(tmp_path, poor, sentence):
    """A sentence names it, and the module runs in PyTorch."""
    assert sentence in said_without(tmp_path, "libcuda.so.1", poor, "torch.nn.Linear(3, 2)", "4, 3")


class Short:
    """torch's allocator, which has no memory for the n-th tensor of those that are asked for."""

    def __init__(self, monkeypatch):
        self.left, self.asked, self.empty = 0, 0, session._empty
        monkeypatch.setattr(session, "_empty", self)

    def __call__(self, *args):
        self.asked += 1
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.empty(*args)


def step(model, tokens):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.filterwarnings("error:.*PyTorch runs:UserWarning")
def test_torch_is_out_of_memory(driver, monkeypatch):  # noqa: F811
    """What torch's allocator raises, for a fraction of memory or for all of it, reaches the caller as it is; nothing is
    held, and the next step is right. Every tensor that a step asks for fails in turn. Without CUDA graphs, of which
    there are more as addresses come back."""
    monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", "0")
    model, tokens = ORTModule(gpt2()), torch.randint(0, 61, (2, 11))
    expected = step(model, tokens)
    gc.collect()
    held, short = driver.fake_held(), Short(monkeypatch)
    step(model, tokens)
    count = short.asked
    assert count > 3
    for n in range(1, count + 1):
        short.left = n
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            step(model, tokens)
        short.left = 0
        assert all(torch.equal(a, b) for a, b in zip(step(model, tokens), expected, strict=True)), n
        assert driver.fake_held() == held


@pytest.mark.parametrize("on", ["1", "0"])
def test_a_step_never_waits(driver, monkeypatch, on):  # noqa: F811
    """From the second one on, which has its plan; as kernels one by one, and when it is recorded and started as CUDA
    graphs."""
    monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", on)
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    torch.manual_seed(0)
    image = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    text, started = gpt2(**DRY), driver.fake_graphs()
    for model, x in ((image, torch.randn(2, 3, 8, 8)), (text, torch.randint(0, 61, (2, 9)))):
        wrapped, expected = ORTModule(model), copy.deepcopy(model)
        for number in range(5):
            waits, found = driver.fake_waits(), []
            for each in (wrapped, expected):
                each.zero_grad()
                y = each(x)
                (y if isinstance(y, torch.Tensor) else y.logits).square().mean().backward()
                if each is wrapped:
                    assert number == 0 or driver.fake_waits() == waits, number
                found.append([p.grad.clone() for p in each.parameters()])
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert (driver.fake_graphs() > started) == (on == "1")
