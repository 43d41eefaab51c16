"""Every architecture of the zoo trains through the engine as it trains in PyTorch (FEW of them without --full)."""

import copy

import pytest
import torch

from ortmodule import ORTModule, explain
from tests.models.compare import (
    InDouble,
    assert_same_buffers,
    assert_same_step,
    pytorch_forbidden,
    step,
    tensors_in,
    to,
)
from tests.models.zoo import ARCHITECTURES, HARD, ILL_CONDITIONED, PURE, SHAPES
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers

#: What is unlike the others.
FEW = PURE.keys() | {
    "resnet", "transformer", "mlp", "cnn", "gemma2", "deberta", "convnext", "lstm", "gru",
    "bloom", "mixtral", "mamba", "fnet", "clip", "swin", "whisper",
}  # fmt: skip


class Pair:
    """The same module twice, wrapped and eager, and batches for both."""

    def __init__(self, name, dtype=torch.float32):
        self.architecture = ARCHITECTURES[name]
        torch.manual_seed(0)
        self.eager = self.architecture.build().to(dtype).train()
        self.dtype = dtype
        self.ours = ORTModule(copy.deepcopy(self.eager))

    def batch(self, size, seed=0):
        return to(self.dtype, self.architecture.batch(self.eager, size, torch.Generator().manual_seed(seed)))

    def check_step(self, size, seed=0):
        batch = self.batch(size, seed)
        expected = step(self.eager, batch)
        assert_same_step(step(self.ours, batch), expected, f"batch {SHAPES[size]}")
        assert_same_buffers(self.ours, self.eager, f"batch {SHAPES[size]}")

    def check_eval(self, size):
        batch = self.batch(size)
        self.eager.eval(), self.ours.eval()
        with torch.no_grad():
            expected, found = tensors_in(self.eager(**batch)), tensors_in(self.ours(**batch))
        assert len(expected) == len(found)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        self.eager.train(), self.ours.train()


def check_captured(name, report):
    assert report.captured, f"not captured: {report.fallback}"
    if name in PURE:
        assert not report.aten_ops and not report.python_ops, f"through PyTorch: {report.aten_ops} {report.python_ops}"


@each("name", [name for name in ARCHITECTURES if name not in HARD | ILL_CONDITIONED], FEW)
def test_float32(name):
    pair = Pair(name)
    pair.check_step(0)
    exports = explain(pair.ours).exports
    pair.check_step(1)
    pair.check_step(0, seed=1)
    report = explain(pair.ours)
    check_captured(name, report)
    assert report.exports == exports, "a new batch shape was exported again"

    # Both a shape that has a plan and one that has none.
    for size in (0, 2):
        batch = pair.batch(size, seed=2)
        expected = step(pair.eager, batch)
        with pytorch_forbidden(pair.ours, pair.eager, {f"aten::{op.removeprefix('aten::')}" for op in report.aten_ops}):
            found = step(pair.ours, batch)
        assert_same_step(found, expected, f"batch {SHAPES[size]} without PyTorch")
    assert explain(pair.ours).exports == exports

    pair.check_eval(0)
    pair.check_eval(1)
    pair.check_step(1, seed=3)


@each("name", [name for name in ARCHITECTURES if name not in HARD], FEW)
def test_float64(name):
    pair = Pair(name, torch.float64)
    with InDouble():
        pair.check_step(0)
        pair.check_step(1)
    check_captured(name, explain(pair.ours))


@each("name", HARD, FEW)
def test_hard(name):
    pair = Pair(name)
    for size in range(len(SHAPES)):
        pair.check_step(size)
    check_captured(name, explain(pair.ours))
    pair.check_eval(0)
