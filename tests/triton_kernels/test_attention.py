"""Flash attention by Triton, by the interpreter: the cases of FusedAttention, dropout, groups, causal masks, biases."""

import copy
from functools import cached_property

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule
from ortmodule.core.logger import warn_once
from ortmodule.triton_kernels.rules import all_rules
from ortmodule.triton_kernels.use import TritonUse
from tests.ops.cases import FAMILIES
from tests.ops.harness import Trial
from tests.triton_kernels.test_models import plans_of

FLASH = TritonUse(all_rules()._replace(flash=True), False)
CASES = [
    pytest.param(case, dtype, id=f"{case.label}-{dtype}")
    for case in FAMILIES["fused_attention"]
    for dtype in case.dtypes
    if dtype != "float64" and not any("300" in part or "4096" in part for part in [case.label])
]


class FlashTrial(Trial):
    @cached_property
    def session(self):
        session = super().session
        session.triton = FLASH
        return session


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_case(case, dtype):
    trial = FlashTrial(case, dtype)
    trial.check_forward()
    if trial.wrt:
        trial.check_gradient()


class Attention(nn.Module):
    def __init__(self, groups=4, drop=0.0, causal=False):
        super().__init__()
        self.groups, self.drop, self.causal = groups, drop, causal

    def forward(self, q, k, v, bias=None):
        if self.groups != q.shape[1]:
            times = q.shape[1] // self.groups
            k, v = (x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (k, v))
        if self.causal:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias
        weights = nn.functional.dropout(scores.softmax(-1), self.drop, self.training)
        return weights @ v


def inputs(queries=37, keys=37, groups=4, width=20, dtype=torch.float32, bias=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, queries, width), (2, groups, keys, width), (2, groups, keys, width)] + ([bias] if bias else [])
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def step(module, given):
    torch.manual_seed(5)
    for x in given:
        x.grad = None
    out = module(*given)
    (out.float() * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
    return [out.detach().float(), *(x.grad.float().clone() for x in given)]


def flash(module):
    warn_once.cache_clear()
    return ORTModule(copy.deepcopy(module), config=Config(use_triton=True, use_flash_attention=True))


def asked_for(wrapped):
    return [line for plan in plans_of(wrapped) for line in plan.text().splitlines() if "triton=" in line]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("groups", "causal", "queries", "keys"),
    [(4, False, 37, 50), (2, True, 40, 40), (1, False, 16, 70)],
)
def test_groups_and_causal_masks(groups, causal, queries, keys, dtype):
    module, given = Attention(groups, causal=causal), inputs(queries, keys, groups, dtype=dtype)
    wrapped = flash(module)
    close = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    for ours, theirs in zip(step(wrapped, given), step(module, given), strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    lines = asked_for(wrapped)
    assert len(lines) == 2 and all(f"triton={2 if causal else 1}" in line for line in lines)


@pytest.mark.parametrize("bias", [(2, 4, 37, 37), (1, 4, 37, 37), (37, 37), (2, 1, 1, 37)], ids=str)
def test_biases_and_their_gradients(bias):
    """Of a bias that broadcasts the engine's own kernels make the gradient."""
    module, given = Attention(), inputs(bias=bias)
    wrapped = flash(module)
    for ours, theirs in zip(step(wrapped, given), step(module, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(asked_for(wrapped)) == (2 if bias == (2, 4, 37, 37) else 0)
    given[3] = given[3].detach()
    wrapped = flash(module)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(*given), module(*given))
    assert len(asked_for(wrapped)) == 1


@pytest.mark.parametrize("groups", [4, 2])
def test_dropout_drops_what_the_engine_drops(groups):
    module, given = Attention(groups, drop=0.3), inputs(groups=groups)
    wrapped = flash(module)
    own = ORTModule(copy.deepcopy(module), config=Config())
    for ours, theirs in zip(step(wrapped, given), step(own, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert len(asked_for(wrapped)) == 2 and not asked_for(own)


def test_it_needs_triton():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="ORTMODULE_USE_FLASH_ATTENTION has no effect without ORTMODULE_USE_TRITON=1"):
        ORTModule(nn.Linear(2, 2), config=Config(use_flash_attention=True))
