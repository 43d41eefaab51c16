"""Attention as one operator: losses and gradients stay what they are, with the same dropout masks.

One captured graph runs twice from one seed, once with the operator wherever its pattern is found and once without.
"""

import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.debug.verify import Verifier
from tests.cpu import HAS_AMX
from tests.models.compare import assert_same_step
from tests.models.zoo import SMALL, VOCABULARY
from tests.passes.test_rows import LANGUAGE, ROWS, SEQ2SEQ, Loss, graphs, language, model, seeded_step, without
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")

FUSED = ("attention_fusion", "efficient_attention", "attention_lengths")
KV = {"num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS = {
    "gpt2": ("CausalLM", {}, 2),
    "llama": ("CausalLM", KV, 2),
    "qwen3": ("CausalLM", KV, 2),
    "mistral": ("CausalLM", KV | {"sliding_window": 5}, 2),
    "gptj": ("CausalLM", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, 2),
    "bert": ("MaskedLM", {}, 2),
    "t5": ("Seq2SeqLM", T5, 6),
    "bart": ("Seq2SeqLM", SEQ2SEQ, 6),
}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setenv("ORTMODULE_USE_EFFICIENT_ATTENTION", "1")


def batch(length=11, holes=True):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (3, length), generator=generator)
    mask = torch.ones(3, length, dtype=torch.long)
    if holes:
        mask[0, 7:] = 0
        mask[1, 2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def text_of(wrapped):
    """Of the plan that ran last."""
    [graph] = graphs(wrapped)
    return next(reversed(graph.session.plans.values())).text()


def fused(wrapped):
    """How often the operator is in the plan that ran last."""
    text = text_of(wrapped)
    return text.count(" = FusedAttention("), text.count(" = FusedAttentionGrad(")


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    head, config, layers = MODELS[name]
    module, given = model(name, head, **config), batch()
    wrapped = ORTModule(module)
    found = seeded_step(wrapped, given)
    assert explain(wrapped).captured, explain(wrapped).fallback
    assert fused(wrapped) == (layers, layers)
    found = found[0], {name: None if g is None else g.clone() for name, g in found[1].items()}
    without(wrapped, FUSED)
    assert_same_step(found, seeded_step(wrapped, given), "attention apart")
    assert fused(wrapped) == (0, 0)


# --- by lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.emulated
@pytest.mark.parametrize("kind", ["right", "left", "holes"])
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.emulated_full) for name in ("gpt2", "llama")), "bert"]
)
def test_rows_that_matter(name, kind, monkeypatch):
    """Nothing in attention has a row for padding, in any layer; and that is the default."""
    monkeypatch.delenv("ORTMODULE_USE_EFFICIENT_ATTENTION")
    model_type, head, config = LANGUAGE[name]
    wrapped, given = ORTModule(Loss(model(model_type, head, **config))), language(kind, 1.1)
    found = seeded_step(wrapped, given)
    found = found[0], {name: None if g is None else g.clone() for name, g in found[1].items()}
    lines = [line for line in text_of(wrapped).splitlines() if " = FusedAttention" in line]
    assert len(lines) == 4 and all("batch=8, queries=16, keys=16" in line for line in lines)
    assert not any("[8, 16, 4, 8]" in line for line in lines)
    for passes in (("attention_lengths",), ROWS):
        without(wrapped, passes)
        assert_same_step(found, seeded_step(wrapped, given), f"without {passes}")


@pytest.mark.emulated
def test_rows_that_matter_to_another_sequence():
    """A decoder looks at an encoder's rows, and has all of its own."""
    given = language("holes", 1.1)
    given["labels"] = given["input_ids"][:, :11]
    wrapped = ORTModule(Loss(model("bart", "Seq2SeqLM", **SEQ2SEQ)))
    found = seeded_step(wrapped, given)
    found = found[0], {name: None if g is None else g.clone() for name, g in found[1].items()}
    assert "queries=11, keys=16" in text_of(wrapped)
    without(wrapped, (*ROWS, *FUSED))
    assert_same_step(found, seeded_step(wrapped, given), "attention over all rows")


# --- as people write it -----------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """As people write it, with PyTorch's function."""

    def __init__(self, dropout=0.0, causal=False):
        super().__init__()
        self.qkv, self.dropout, self.causal = nn.Linear(32, 96), dropout, causal

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.emulated
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [5, 64, 65, 300])
def test_scaled_dot_product_attention(length, causal):
    torch.manual_seed(0)
    module, x = SelfAttention(causal=causal), torch.randn(2, length, 32)
    wrapped, dy = ORTModule(module), torch.randn(2, length, 32)
    y = wrapped(x)
    y.backward(dy)
    found = [p.grad.clone() for p in module.parameters()]
    assert fused(wrapped) == (1, 1)
    expected = torch.autograd.grad(module(x), list(module.parameters()), dy)
    torch.testing.assert_close(y, module(x), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class Heads(nn.Module):
    """Of queries, keys and values beside each other, two heads to a key."""

    def forward(self, x):
        q, k, v = x.split((64, 32, 32), -1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(dtype):
    x, before, results = torch.randn(2, 150, 128, dtype=dtype), torch.get_num_threads(), []
    wrapped = ORTModule(Heads())
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            leaf = x.clone().requires_grad_()
            y = wrapped(leaf)
            y.square().sum().backward()
            results.append((y.detach().clone(), leaf.grad))
    finally:
        torch.set_num_threads(before)
    assert fused(wrapped) == (1, 1)
    for y, dx in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(dx, results[0][1])


class Masked(nn.Module):
    """Of heads, with any kind of mask."""

    def __init__(self, causal):
        super().__init__()
        self.causal = causal

    def forward(self, q, k, v, mask=None):
        return nn.functional.scaled_dot_product_attention(q * 1, k, v, attn_mask=mask, is_causal=self.causal)


@pytest.mark.emulated
@pytest.mark.parametrize("efficient", ["0", "1"])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bias"])
@each(
    ("length", "width", "dtype"),
    [(16, 32, torch.bfloat16), (16, 32, torch.float16), (300, 80, torch.bfloat16), (300, 80, torch.float16)],
    lambda case: case != (300, 80, torch.float16),
    pytest.mark.emulated_full,
)
def test_16_bits_are_as_near_to_the_exact_result_as_in_pytorch(dtype, length, width, mask, efficient, monkeypatch):
    """Results and gradients, of scores of some size; the root mean square of the error in PyTorch is the measure."""
    monkeypatch.setenv("ORTMODULE_USE_EFFICIENT_ATTENTION", efficient)
    torch.manual_seed(0)
    q, k, v, dy = (torch.randn(2, 3, length, width).to(dtype) * scale for scale in (3, 1, 1, 1))
    given = {
        "bool": torch.rand(2, 1, 1, length) > 0.3,
        "bias": torch.randn(2, 3, length, length).to(dtype),
    }.get(mask)
    plain, results = Masked(mask == "causal"), []
    for module, kind in (plain, torch.float64), (plain, dtype), (ORTModule(plain), dtype):
        leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
        more = [] if given is None else [given if mask == "bool" else given.to(kind)]
        y = module(*leaves, *more)
        results.append([y.detach().double(), *(g.double() for g in torch.autograd.grad(y, leaves, dy.to(kind)))])
    for exact, theirs, ours in zip(*results, strict=True):
        assert (ours - exact).square().mean() <= 1.7**2 * (theirs - exact).square().mean()


def test_scores_are_not_kept():
    module, x = SelfAttention(dropout=0.1), torch.randn(1, 1024, 32)
    wrapped = ORTModule(module)
    wrapped(x).sum().backward()
    [graph] = graphs(wrapped)
    with_it = next(reversed(graph.session.plans.values())).arena_bytes
    without(wrapped, FUSED)
    wrapped(x).sum().backward()
    apart = next(reversed(graph.session.plans.values())).arena_bytes
    assert apart > 4 * 1024 * 1024 * 4 > 4 * with_it


def test_off_by_default(monkeypatch):
    monkeypatch.delenv("ORTMODULE_USE_EFFICIENT_ATTENTION")
    wrapped = ORTModule(SelfAttention())
    wrapped(torch.randn(2, 16, 32)).sum().backward()
    assert fused(wrapped) == (0, 0)


def test_verified_against_pytorch(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    config = transformers.AutoConfig.for_model("gpt2", **SMALL)
    wrapped = ORTModule(transformers.AutoModelForCausalLM.from_config(config).train())
    wrapped(**batch()).loss.backward()
    assert fused(wrapped) == (2, 2)
    verifier = wrapped._ortmodule.observers.one(Verifier)
    assert verifier.compared == verifier.gradients == 1
    assert not verifier.findings, verifier.findings[0]


# --- by torch's kernel ------------------------------------------------------------------------------------------------

ON_AMX = pytest.mark.skipif(not HAS_AMX, reason="the table has torch's kernel for AMX only")


class Attention(nn.Module):
    """Of [batch, length, heads, 8] queries, keys and values."""

    def __init__(self, causal=False, dropout=0.0, mask=None):
        super().__init__()
        self.causal, self.dropout, self.mask = causal, dropout, mask

    def forward(self, q, k, v):
        shared = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if shared > 1:
            k, v = (x[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for x in (k, v))
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, dropout_p=self.dropout, is_causal=self.causal
        )


def tensors(queries, keys, groups=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = (2, queries, 2, 8), (2, keys, groups, 8), (2, keys, groups, 8)
    return [torch.randn(size, generator=generator, dtype=dtype, requires_grad=True) for size in sizes]


@ON_AMX
@pytest.mark.parametrize(
    ("queries", "keys", "groups", "causal"),
    [(1024, 1024, 2, False), (70, 1100, 2, False), (512, 1024, 1, False), (2048, 2048, 2, True), (2048, 2048, 1, True)],
)
def test_attention_by_torch(queries, keys, groups, causal, monkeypatch):
    monkeypatch.delenv("ORTMODULE_USE_EFFICIENT_ATTENTION")
    module, given = Attention(causal), tensors(queries, keys, groups)
    wrapped = ORTModule(module)
    y = wrapped(*given)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy)
    assert text_of(wrapped).count(f"torch={2 if causal else 1}") == 2
    expected = module(*given)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found, torch.autograd.grad(expected, given, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    without(wrapped, FUSED)
    again = wrapped(*given)
    torch.testing.assert_close(y, again, rtol=1e-5, atol=1e-6)
    assert fused(wrapped) == (0, 0)


@pytest.mark.parametrize(
    ("module", "length", "dtype"),
    [
        (Attention(dropout=0.1), 1024, torch.float32),
        (Attention(mask=torch.ones(1024, 1024).tril(3).bool()), 1024, torch.float32),
        (Attention(causal=True), 1024, torch.float32),
        (Attention(), 100, torch.float32),
        (Attention(), 1024, torch.bfloat16),
        (Attention(), 1024, torch.float64),
    ],
    ids=["dropout", "mask", "causal", "short", "bfloat16", "float64"],
)
def test_attention_that_torch_is_not_asked_for(module, length, dtype):
    wrapped = ORTModule(module)
    wrapped(*tensors(length, length, dtype=dtype)).sum().backward()
    assert fused(wrapped) == (1, 1)
    assert text_of(wrapped).count("torch=0") == 2


@ON_AMX
def test_autocast_does_not_reach_torch():
    """The call sees nothing of what the user has switched on around it: float32 stays float32."""
    given, wrapped = tensors(1024, 1024), ORTModule(Attention())
    y = wrapped(*given)
    with torch.autocast("cpu", torch.bfloat16):
        [dq, *_] = torch.autograd.grad(y, given, torch.ones_like(y))
    assert "torch=1" in text_of(wrapped)
    expected = Attention()(*given)
    torch.testing.assert_close(dq, torch.autograd.grad(expected, given, torch.ones_like(y))[0], rtol=1e-4, atol=1e-5)
