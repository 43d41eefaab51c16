"""Attention of many scores on a GPU runs kernels of torch's (csrc/cuda/libraries/attention.h).

Beside float64, and with dropout beside PyTorch, which draws the same elements. `scripts/gpu` runs them.
"""

import copy

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


class Padded(nn.Module):
    """Tokens [batch, length, features] with a mask of those that are there, and the sums of these."""

    def __init__(self, causal, width, groups, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.width, self.rate = causal, width, rate
        self.sizes = HEADS * width, groups * width, groups * width
        self.qkv, self.out = nn.Linear(256, sum(self.sizes)), nn.Linear(HEADS * width, 64)

    def forward(self, x, mask):
        q, k, v = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        if k.shape[1] != q.shape[1]:
            k, v = (t[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for t in (k, v))
        allowed = (mask != 0)[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        if self.causal:
            allowed = allowed & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=self.rate)
        return (self.out(y.transpose(1, 2).flatten(2)) * mask.unsqueeze(-1).to(x.dtype)).sum(1)


PADDED = 8
#: Tokens of each sequence; with no token, and full.
LENGTHS = {"half": [512, 17, 300, 1, 256, 0, 128, 400], "none": [LENGTH] * PADDED, "little": [512] * 7 + [490]}


def padded_step(module, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PADDED, LENGTH, 256, generator=generator).to(DEVICE, dtype).requires_grad_()
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS[kind])[:, None]).long().to(DEVICE)
    torch.manual_seed(3)
    y = module(x, mask)
    dy = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("width", "groups"), [(64, 16), (128, 16), (64, 4)])
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_padding_beside_float64(causal, kind, width, groups, dtype):
    """Over the tokens that the mask shows; where it hides nothing, without it."""
    module = Padded(causal, width, groups).to(DEVICE, dtype)
    ours = ORTModule(copy.deepcopy(module))
    padded_step(ours, kind, dtype)
    found, eager = padded_step(ours, kind, dtype), padded_step(module, kind, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        exact = padded_step(copy.deepcopy(module).double(), kind, torch.float64)
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        assert distance(mine, right) <= 2 * distance(theirs, right) + LEAST[dtype]
    report = explain(ours)
    assert report.captured and not report.aten_ops and not report.refused, (report.fallback, report.refused)
    assert ("mask_removal" if kind == "none" else "padding_removal") in report.fused


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_padding_and_dropout(causal, kind):
    """Backward drops what forward dropped: results are linear in the last weight, so that its gradient times it is the
    results times their gradient, added up; less what the bias gives."""
    ours = ORTModule(Padded(causal, 64, 16, 0.2).to(DEVICE, torch.bfloat16))
    with torch.no_grad():
        ours.out.bias.zero_()
    y, *_ = padded_step(ours, kind, torch.bfloat16)
    y, *grads = padded_step(ours, kind, torch.bfloat16)
    dy = torch.randn(PADDED, 64, generator=after_tokens()).to(y)
    d_out = grads[1 + [name for name, _ in ours.named_parameters()].index("out.weight")]
    sums = [(a.double() * b.double()).sum() for a, b in ((d_out, ours.out.weight), (y, dy))]
    assert y.isfinite().all() and abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()
    assert "flash_dropout" in explain(ours).fused


def after_tokens():
    """The generator as padded_step has it when it draws the gradient of results."""
    generator = torch.Generator().manual_seed(0)
    torch.randn(PADDED, LENGTH, 256, generator=generator)
    return generator


class Hidden(nn.Module):
    """With a mask that is data, or a bias that is a parameter, or both: torch's memory-efficient kernel takes them as a
    bias."""

    def __init__(self, kind, keys, rate=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.kind, self.rate = kind, rate
        size = {"keys": (BATCH, 1, 1, keys), "all": (BATCH, HEADS, LENGTH, keys)}.get(kind, (1, HEADS, LENGTH, keys))
        self.bias = None if kind == "mask" else nn.Parameter(torch.randn(size, generator=generator))

    def forward(self, q, k, v, mask):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.bias is not None:
            scores = scores + self.bias
        if "mask" not in self.kind:
            return F.dropout(scores.softmax(-1), self.rate) @ v
        allowed = (mask != 0)[:, None]
        weights = torch.where(allowed, torch.where(allowed, scores, -torch.inf).softmax(-1), 0.0)
        return F.dropout(weights, self.rate) @ v


def hidden_step(module, dtype, keys):
    generator = torch.Generator().manual_seed(0)
    sizes = [(BATCH, HEADS, length, 64) for length in (LENGTH, keys, keys)]
    leaves = [torch.randn(size, generator=generator).to(DEVICE, dtype).requires_grad_() for size in sizes]
    mask = (torch.rand(BATCH, LENGTH, keys, generator=generator) < 0.6).long()
    mask[:, ::3] = 0  # these see nothing
    torch.manual_seed(3)
    y = module(*leaves, mask.to(DEVICE))
    dy = torch.randn(y.shape, generator=generator).to(y.device, y.dtype)
    return leaves, dy, [y.detach(), *torch.autograd.grad(y, [*leaves, *module.parameters()], dy)]


def taken_as_a_bias(kernels):
    return any("fmha_cutlassF" in name for name in kernels) and any("fmha_cutlassB" in name for name in kernels)


def kernels_of(run):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("keys", [LENGTH, LENGTH - 3])
@pytest.mark.parametrize("kind", ["mask", "heads", "keys", "all", "heads and mask"])
def test_masks_and_biases_beside_float64(kind, keys, dtype):
    module = Hidden(kind, keys).to(DEVICE, dtype)
    ours = ORTModule(copy.deepcopy(module))
    hidden_step(ours, dtype, keys)
    found, eager = hidden_step(ours, dtype, keys)[2], hidden_step(module, dtype, keys)[2]
    exact = hidden_step(copy.deepcopy(module).double(), torch.float64, keys)[2]
    for mine, theirs, right in zip(found, eager, exact, strict=True):
        assert distance(mine, right) <= 2 * distance(theirs, right) + LEAST[dtype]
    assert taken_as_a_bias(kernels_of(lambda: hidden_step(ours, dtype, keys)))
    report = explain(ours)
    assert report.captured and not report.aten_ops and not report.refused, (report.fallback, report.refused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("keys", [LENGTH, LENGTH - 3])
@pytest.mark.parametrize("kind", ["mask", "heads", "heads and mask"])
def test_masks_biases_and_dropout(kind, keys, dtype):
    """Backward drops what forward dropped: results are linear in v."""
    ours = ORTModule(Hidden(kind, keys, 0.2).to(DEVICE, dtype))
    hidden_step(ours, dtype, keys)
    leaves, dy, (y, _, _, dv, *_) = hidden_step(ours, dtype, keys)
    sums = [(a.double() * b.double()).sum() for a, b in ((dv, leaves[2].detach()), (y, dy))]
    assert y.isfinite().all() and abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()
    assert "flash_dropout" in explain(ours).fused


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
