"""Attention of many scores on a GPU, by kernels of torch's (csrc/cuda/libraries/attention.h): beside float64, and with
dropout beside PyTorch, which draws the same elements. `scripts/gpu` runs them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ortmodule import ORTModule, explain
from tests.gpu.test_models import DEVICE

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="a GPU is needed (scripts/gpu)")

BATCH, LENGTH, HEADS = 4, 512, 16  # 16 million scores
LEAST = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Attention(nn.Module):
    def __init__(self, causal, rate=0.0):
        super().__init__()
        self.causal, self.rate = causal, rate

    def forward(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if k.shape[1] != q.shape[1]:
            k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=self.causal)
        return y.transpose(1, 2)


def operands(dtype, width, groups):
    generator = torch.Generator().manual_seed(0)
    sizes = [(BATCH, LENGTH, heads, width) for heads in (HEADS, groups, groups)]
    return [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes]


def step(module, tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(3)
    y = module(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def distance(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "groups"), [(64, 16), (128, 16), (64, 4), (256, 16)])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_beside_float64(causal, width, groups, dtype):
    module, tensors = Attention(causal), operands(dtype, width, groups)
    ours = ORTModule(module)
    step(ours, tensors)
    found, eager = step(ours, tensors), step(module, tensors)
    with sdpa_kernel(SDPBackend.MATH):
        exact = step(module, [t.double() for t in tensors])
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        assert distance(mine, right) <= 2 * distance(theirs, right) + LEAST[dtype]
    report = explain(ours)
    assert report.captured and not report.aten_ops and not report.refused, (report.fallback, report.refused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "groups"), [(64, 16), (128, 16), (64, 4)])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_dropout_beside_pytorch(causal, width, groups, dtype):
    """Of the same state of torch's generator flash attention drops the same elements here and there."""
    module, tensors = Attention(causal, 0.2), operands(dtype, width, groups)
    ours = ORTModule(module)
    step(ours, tensors)
    found = step(ours, tensors)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        eager = step(module, tensors)
    for mine, theirs in zip(found, eager, strict=True):
        assert distance(mine, theirs.double()) <= LEAST[dtype]
    assert "flash_dropout" in explain(ours).fused


def test_the_same_bits_where_torch_is_told_to():
    module, tensors = ORTModule(Attention(True)), operands(torch.bfloat16, 64, 16)
    step(module, tensors)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(module, tensors), step(module, tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
