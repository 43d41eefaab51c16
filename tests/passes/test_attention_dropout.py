"""16-bit attention as one operator with dropout: PyTorch gets its masks, and float64 says how near both are.

The bound is PyTorch's own error in the same type. Sizes lie around the kernel's tiles of 64 queries and 256 keys.
"""

import pytest
import torch
from torch import nn

from ortmodule import explain
from tests.cpu import HAS_AVX512_BF16
from tests.exact import assert_as_near, check_step, drawn, recorded
from tests.passes.test_attention import fused, text_of
from tests.passes.test_rows import LANGUAGE, Loss, language, model
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers
NARROW = [torch.bfloat16, torch.float16]
HEADS, WIDTH = 4, 16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setenv("ORTMODULE_USE_EFFICIENT_ATTENTION", "1")


class Attention(nn.Module):
    """Of [batch, length, heads, width] queries, keys and values; heads may share keys and values."""

    def __init__(self, rate, causal=False):
        super().__init__()
        self.rate, self.causal = rate, causal

    def forward(self, q, k, v, mask=None):
        shared = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if shared > 1:
            k, v = (x[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for x in (k, v))
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.rate, is_causal=self.causal
        )


def check(dtype, queries, keys, groups=HEADS, kind="none", rate=0.1):
    """Result and gradients of queries, keys, values and of a bias."""
    generator = torch.Generator().manual_seed(queries + keys)
    sizes = (2, queries, HEADS, WIDTH), (2, keys, groups, WIDTH), (2, keys, groups, WIDTH)
    given = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    dy = torch.randn(2, HEADS, queries, WIDTH, generator=generator).to(dtype)
    if kind == "bool":
        mask = torch.rand(2, 1, queries, keys, generator=generator) > 0.3
        mask[..., 0] = True
        given.append(mask)
    elif kind == "bias":
        given.append(torch.randn(1, HEADS, queries, keys, generator=generator).to(dtype))
    module = Attention(rate, kind == "causal")
    ours, recorder = recorded(module)

    def run(f, kind):
        leaves = [x.to(kind).requires_grad_() if x.is_floating_point() else x for x in given]
        wanted = [x for x in leaves if x.requires_grad]
        y = f(*leaves)
        found = [y.detach(), *torch.autograd.grad(y, wanted, dy.to(kind))]
        return dict(zip(("the result", "dq", "dk", "dv", "dbias"), found, strict=False))

    torch.manual_seed(queries)
    found = run(ours, dtype)
    assert explain(ours).captured, explain(ours).fallback
    assert fused(ours) == (1, 1)
    [draw] = recorder.draws
    if draw.tensor.numel() > 100:
        assert 0 < draw.tensor.double().mean() < 1, "nothing, or everything, was dropped"
    sides = [found]
    for kind in (dtype, torch.float64):
        with drawn(recorder.draws):
            sides.append(run(module, kind))
    if keys == 1:  # the weight is 1, whatever the scores are: their gradients are roundings of nothing
        most = {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype] * dy.double().abs().max()
        assert all(
            side.pop(name).double().abs().max() <= most for side in sides for name in list(side)[1:3] + list(side)[4:]
        )
    assert_as_near(*sides, dtype)


SIZES = [(1, 1), (63, 255), (64, 256), (65, 257), (130, 300), (300, 70), (257, 513)]


@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
@each(("queries", "keys"), SIZES, [(63, 255), (65, 257), (300, 70)])
@pytest.mark.parametrize("kind", ["none", "bool", "bias"])
def test_masks_and_sizes(kind, queries, keys, dtype):
    check(dtype, queries, keys, kind=kind)


@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
@each("length", [5, 63, 64, 65, 256, 257, 300], [5, 65, 257])
def test_causal(length, dtype):
    check(dtype, length, length, kind="causal")


@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 2])
def test_heads_that_share_keys(groups, dtype):
    check(dtype, 65, 257, groups)
    check(dtype, 257, 257, groups, "causal")


@each("rate", [0.01, 0.5, 0.9], [0.5])
@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
def test_rates(dtype, rate):
    check(dtype, 130, 300, rate=rate)


@pytest.mark.skipif(not HAS_AVX512_BF16, reason="this CPU has no kernel of ours for 16-bit products")
@pytest.mark.parametrize("dtype", NARROW, ids=["bfloat16", "float16"])
def test_by_default(dtype, monkeypatch):
    """Where the operator is taken without being asked for."""
    monkeypatch.delenv("ORTMODULE_USE_EFFICIENT_ATTENTION")
    check(dtype, 512, 512, kind="causal")


# --- padding removed --------------------------------------------------------------------------------------------------

KINDS = ("right", "left", "holes")
EACH = [(name, kind, dtype) for name in ("gpt2", "llama", "bert") for kind in KINDS for dtype in NARROW]
SHORT = {("gpt2", "right", NARROW[0]), ("llama", "left", NARROW[1]), ("bert", "holes", NARROW[0])}


@each(("name", "kind", "dtype"), EACH, SHORT.__contains__, ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_rows_that_matter(name, kind, dtype, autocast):
    """A model whose attention has the rows of tokens that are there, and no others."""
    model_type, head, config = LANGUAGE[name]
    if name == "llama":
        config = config | {"attention_dropout": 0.1}
    module = Loss(model(model_type, head, **config))
    how = {"autocast": dtype} if autocast else {"dtype": dtype}
    ours, recorder = check_step(module, language(kind, 1.1), **how)
    assert fused(ours) == (2, 2)
    assert "batch=8, queries=16, keys=16" in text_of(ours)
    assert recorder.draws
