"""Each pass on the PyTorch code it is for: it changes the graph, and neither results nor gradients.

What a pass does to the text of a graph is tested in tests/c (docs/passes.md says where).
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half
from transformers.models.t5.modeling_t5 import T5LayerNorm

from ortmodule import _core
from ortmodule.engine.session import DTYPES
from tests.passes.session import (
    ALL_PASSES,
    BF16,
    CLEAN_UP,
    F32,
    F64,
    NO_PASSES,
    TOLERANCE,
    Function,
    difference,
    export,
    run,
)

# --- what is rewritten ------------------------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    """As people write it."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        y = self.weight * ((x - mean) / torch.sqrt(variance + 1e-6))
        return y if self.bias is None else y + self.bias


def hidden_rows():
    """A mask whose first row allows nothing."""
    allowed = torch.ones(2, 1, 4, 4).tril().bool()
    allowed[1, :, 0] = False
    return allowed


def masked_attention(q, k, v, lowest=None):
    allowed = hidden_rows()
    scores = torch.where(allowed, q @ k.transpose(-1, -2), torch.finfo(q.dtype).min if lowest is None else lowest)
    return torch.where(allowed, scores.softmax(-1), 0.0) @ v


def filled_attention(q, k, v):
    hidden = ~hidden_rows()
    scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ v


def scaled_scores(q, k):
    return (q * 0.5) @ (k.transpose(-1, -2) / 3) * 1.5


def attention(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def wide_weights(q, k, v):
    """As models of 16 bits write it."""
    return (q @ k.transpose(-1, -2)).float().softmax(-1).type(q.dtype) @ v


def gelu_as_autocast(x):
    """GPT-2's, as autocast has it on a GPU: the power in float32, and with it all that follows."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.float() ** 3)
    return (0.5 * x * (1 + torch.tanh(inner))).type(x.dtype)


def attention_with_bias(q, k, v, bias):
    return (bias + q @ k.transpose(-1, -2)).softmax(-1) @ v


def grouped_attention(q, k, v):
    """Two heads share keys and values."""
    k, v = (x[:, :, None].expand(2, 3, 2, 4, 8).reshape(2, 6, 4, 8) for x in (k, v))
    return attention(q, k, v)


def split_in_three(x):
    a, b, c = x.split((4, 3, 1), dim=-1)
    return torch.cat((a.exp(), c.sin(), b * 2), -1) + x


def recurrence(x):
    """A slice for each step, the last of them left out; and a window that slides."""
    h, parts = x[:, 0], []
    for i in range(1, x.shape[1] - 1):
        h = torch.tanh(h + x[:, i])
        parts.append(h * x[:, i - 1 : i + 2].mean(1))
    return torch.stack(parts, 1)


def joined_and_cut(x, y):
    """Of the first, of the second, of both, and backwards through the second."""
    both = torch.cat((x, y), -1)
    return both[..., :8].exp() * both[..., 9:].mean(-1, keepdim=True) + both[..., 4:12] - both[..., 8:].flip(-1)


def cut_and_joined(x):
    a, b, c = x.split((3, 1, 4), -1)
    return torch.cat((b, c, a), -1).tanh() + torch.cat((a, b, c), -1)


def regrouped(x, y, z):
    """Three pieces become two: their gradients are joined, and cut again."""
    whole = torch.cat((x, y, z), -1)
    a, b = whole.split(4, -1)
    return a.exp() * b.sin() + whole[..., 3:4]


def cast_product(x, w):
    return x.double() @ w.t().double()


def rotary(x):
    angle = torch.linspace(0, 1, 8, dtype=x.dtype)
    return x * angle.cos() + rotate_half(x) * angle.sin()


def rotary_heads(x):
    """As in attention: of a transposed projection, an angle for each position."""
    angle = torch.arange(5, dtype=x.dtype)[:, None] * torch.linspace(0.1, 1, 8, dtype=x.dtype)
    heads = x.view(2, 5, 3, 8).transpose(1, 2)
    return heads * angle.cos() + rotate_half(heads) * angle.sin()


def rotary_under_autocast(x):
    """Of a 16-bit projection, by angles in float32: rounded once, when attention reads it."""
    angle = torch.arange(5, dtype=F32)[:, None] * torch.linspace(0.1, 1, 8)
    heads = x.view(2, 5, 3, 8).transpose(1, 2)
    return (heads.float() * angle.cos() + rotate_half(heads).float() * angle.sin()).type(x.dtype)


def rotary_in_float32(x):
    """As modules spell it out."""
    angle = torch.arange(5, dtype=F32)[:, None] * torch.linspace(0.1, 1, 8)
    heads = x.view(2, 5, 3, 8).transpose(1, 2).float()
    return (heads * angle.cos() + rotate_half(heads) * angle.sin()).type(x.dtype)


def repeated_and_rounded(x):
    """As keys of several heads are, with rotary embeddings under autocast."""
    y = (x.float() * 1.7)[:, :, None].expand(-1, -1, 4, -1).reshape(3, 20, 8)
    return y.transpose(1, 2).type(x.dtype)


@dataclass
class Case:
    name: str  # of the pass
    module: nn.Module
    shapes: tuple = ((3, 5, 8),)
    dtypes: tuple = (F32, F64, BF16)

    def __str__(self):
        return f"{self.name}-{getattr(getattr(self.module, 'function', None), '__name__', type(self.module).__name__)}"


HEADS = ((2, 3, 4, 8),) * 3
CASES = [
    Case("gelu_fusion", nn.GELU()),
    Case("gelu_fusion", nn.GELU("tanh")),
    Case("gelu_fusion", ACT2FN["gelu_new"]),
    Case("gelu_fusion", ACT2FN["gelu_fast"], dtypes=(F32, BF16)),  # its constant has ten digits
    Case("gelu_fusion", ACT2FN["gelu_python"]),
    Case("gelu_fusion", Function(gelu_as_autocast), dtypes=(BF16,)),
    Case("silu_fusion", nn.SiLU()),
    Case("silu_fusion", ACT2FN["quick_gelu"]),
    Case("norm_fusion", LlamaRMSNorm(8), dtypes=(F32, BF16)),  # float64 stays as it is: it is computed in float32
    Case("norm_fusion", T5LayerNorm(8), dtypes=(F32, BF16)),
    Case("norm_fusion", GemmaRMSNorm(8), dtypes=(F32, BF16)),
    Case("norm_fusion", LayerNorm(8, bias=True)),
    Case("norm_fusion", LayerNorm(8, bias=False)),
    Case("softmax_cast", Function(wide_weights), HEADS, (BF16,)),
    Case("masked_softmax", Function(masked_attention), HEADS),
    Case("masked_softmax", Function(filled_attention), HEADS),
    Case("efficient_attention", Function(attention), HEADS),
    Case("efficient_attention", Function(attention_with_bias), (*HEADS, (3, 4, 4))),
    Case("efficient_attention", Function(grouped_attention), ((2, 6, 4, 8), *HEADS[:2])),
    Case("attention_fusion", Function(attention), ((1, 2, 64, 8), *((1, 2, 1024, 8),) * 2), (F32, F64)),
    Case("matmul_fusion", nn.Linear(8, 6)),
    Case("matmul_fusion", Function(scaled_scores), HEADS[:2]),
    Case("matmul_fusion", Function(cast_product), ((3, 5, 8), (6, 8)), (F32,)),
    Case("concat_gradient", Function(split_in_three)),
    Case("concat_gradient", Function(rotary)),
    Case("concat_gradient", Function(recurrence), ((2, 24, 3),)),
    Case("concat_slices", Function(joined_and_cut), ((3, 5, 8),) * 2),
    Case("concat_slices", Function(cut_and_joined)),
    Case("concat_slices", Function(regrouped), ((3, 5, 2), (3, 5, 4), (3, 5, 2))),
    Case("rotary_fusion", Function(rotary)),
    Case("rotary_fusion", Function(rotary_heads), ((2, 5, 24),)),
    Case("rotary_fusion", Function(rotary_under_autocast), ((2, 5, 24),), (BF16,)),
    Case("rotary_fusion", Function(rotary_in_float32), ((2, 5, 24),), (BF16,)),
    Case("early_cast", Function(repeated_and_rounded), dtypes=(BF16,)),
]


class Projections(nn.Module):
    """The gradient of `x` is a sum of three products, which a softmax reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(8, 6)) for _ in range(3))

    def forward(self, x):
        x = x.softmax(-1)
        return torch.tanh(x @ self.first) * (x @ self.second) + (x @ self.third) * 0.5


class Adapters(nn.Module):
    """Matrices of few columns beside a wide one, as in layers with adapters of a low rank; two with a bias."""

    def __init__(self):
        super().__init__()
        self.wide, self.down = nn.Linear(8, 40, bias=False), nn.Linear(8, 4, bias=False)
        self.other, self.third = nn.Linear(8, 3, bias=False), nn.Linear(8, 6, bias=False)
        self.first_head, self.second_head = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x):
        x = x.softmax(-1)
        heads = torch.cat((self.first_head(x).tanh(), self.second_head(x)), -1)
        return self.wide(x)[..., :3] * self.down(x)[..., 1:] + self.other(x) * self.third(x)[..., ::2] * heads


class Tied(nn.Module):
    """A table of words that is the last layer's weight, too; one word of it has no gradient as a word."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(11, 8))

    def forward(self, x):
        words = nn.functional.embedding(x.argmax(-1), self.table, padding_idx=2)
        return (words + x) @ self.table.t()


class Block(nn.Module):
    """A norm after a residual addition whose sum goes on, too, as before every layer of most models."""

    def __init__(self, width, bias=True):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)

    def forward(self, x, residual):
        s = x + residual
        return s.softmax(-1) @ s.transpose(1, 2) + self.norm(s) @ s.transpose(1, 2)


CASES += [
    Case("norm_residual", Block(8), ((3, 5, 8),) * 2),
    Case("norm_residual", Block(1030, bias=False), ((2, 3, 1030),) * 2, dtypes=(F32, F64)),
]


class Embeddings(nn.Module):
    """As models with BERT's embeddings begin; one word has no gradient."""

    def __init__(self, kinds=True):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8, padding_idx=2), nn.Parameter(torch.ones(1, 5, 8))
        self.kinds = nn.Embedding(2, 8) if kinds else None
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        s = self.words(x.argmax(-1))
        if self.kinds:
            s = s + self.kinds((x[..., 0] > 0).long())
        return self.norm(s + self.places) @ x[..., :8].transpose(1, 2)


CASES += [Case("embedding_norm", Embeddings(kinds), ((3, 5, 11),)) for kinds in (True, False)]
CASES += [Case("parallel_products", Adapters(), ((2, 150, 8),)), Case("parallel_products", Adapters(), ((300, 8),))]
CASES += [Case("gradient_sum", module, dtypes=(F32, F64)) for module in (Projections(), Tied())]


# --- running it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype"),
    [pytest.param(case, dtype, id=f"{case}-{DTYPES[dtype]}") for case in CASES for dtype in case.dtypes],
)
def test_pass(case, dtype):
    torch.manual_seed(0)
    module = case.module.to(dtype)
    operands = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in case.shapes]
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_()
    session = export(module, [x.detach() for x in operands])
    leaves = [operands[int(name[1:])] if name[0] == "x" else parameters[name] for name in session.inputs]

    expected = module(*operands)
    dy = torch.randn_like(expected, memory_format=torch.contiguous_format)
    expected = [expected.detach(), *torch.autograd.grad(expected, leaves, dy)]
    tensors = [leaf.detach().contiguous() for leaf in leaves]
    bit = _core.passes()[case.name]
    for disabled in (NO_PASSES ^ bit, ALL_PASSES, bit, CLEAN_UP):
        fired, results = run(session, tensors, dy, disabled)
        assert disabled != NO_PASSES ^ bit or set(fired) == {case.name}
        assert not disabled & bit or case.name not in fired
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.isfinite(ours).all()
            assert difference(ours, theirs) <= TOLERANCE[dtype]


def test_the_gradient_of_a_weight_that_is_used_again():
    """y = x + x w, in a loop: dw is a sum of products, and dy is read by the product whose result is added to it."""
    torch.manual_seed(0)

    def forward(x, w):
        for _ in range(3):
            x = x.softmax(-1)
            x = x + x @ w
        return x

    operands = [torch.randn(5, 8), torch.randn(8, 8)]
    session, dy = export(Function(forward), operands), torch.randn(5, 8)
    leaves = [t.clone().requires_grad_() for t in operands]
    y = forward(*leaves)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    fired, results = run(session, operands, dy, ALL_PASSES)
    assert "gradient_sum" in fired
    for ours, theirs in zip(results, expected, strict=True):
        assert difference(ours, theirs) <= TOLERANCE[F32]


def test_switched_off():
    session = export(nn.GELU(), [torch.ones(2, 3)])
    plan = session.model.plan([("float32", (2, 3))], [True], [True], NO_PASSES | CLEAN_UP)
    assert plan.fired == {}


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_clean_up(dtype):
    """As people write it, shapes, axes and types there and back: the same bits with fewer steps."""

    def forward(x):
        y = x.view(2, 12).reshape(4, 6).t().t() + 0
        y = -(-y * 1).double().to(dtype).expand(4, 6).sum(0, keepdim=True).mean(0)
        return y.unsqueeze(0).expand(3, 6).expand(2, 3, 6).reshape(6, 6)

    x, dy = torch.randn(4, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype)
    session, leaf = export(Function(forward), [x]), x.clone().requires_grad_()
    y = forward(leaf)
    expected = [y.detach(), *torch.autograd.grad(y, leaf, dy)]
    steps = []
    for disabled in (ALL_PASSES, NO_PASSES, CLEAN_UP, NO_PASSES | CLEAN_UP):
        plan = session.model.plan([(DTYPES[dtype], (4, 6))], [True], [True], disabled)
        assert ("clean_up" in plan.fired) == (not disabled & CLEAN_UP)
        steps.append(sum(plan.nodes))
        for ours, theirs in zip(run(session, [x], dy, disabled)[1], expected, strict=True):
            assert difference(ours, theirs) <= TOLERANCE[dtype]
    assert steps[0] < steps[2] and steps[1] < steps[3]


def test_angles_with_a_gradient_stay():
    session = export(Function(lambda x, c: x * c + rotate_half(x) * c), [torch.ones(3, 4), torch.ones(3, 4)])
    fired, _ = run(session, [torch.ones(3, 4)] * 2, torch.ones(3, 4), ALL_PASSES)
    assert "rotary_fusion" not in fired


def test_a_gradient_that_is_added_to_lies_where_it_is_given_back():
    module = Tied()
    module.table = nn.Parameter(torch.randn(5000, 64))
    x = torch.randn(3, 64)
    session = export(module, [x])
    tensors = [x, module.table.detach()]
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    plan = session.model.plan(specs, (True,) * 2, (True,), ALL_PASSES)
    assert plan.fired["gradient_sum"] == 1
    assert plan.arena_bytes < module.table.numel() * 4


def test_a_mask_of_minus_infinity():
    """As `masked_attention`, with the other number that hides."""
    module = Function(lambda q, k, v: masked_attention(q, k, v, -math.inf))
    operands = [torch.randn(2, 3, 4, 8) for _ in range(3)]
    session = export(module, operands)
    fired, results = run(session, operands, torch.ones(2, 3, 4, 8), ALL_PASSES)
    assert fired["masked_softmax"] == 1
    assert (results[0][1, :, 0] == 0).all()
    assert all(torch.isfinite(x).all() for x in results)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "passes.md"


def test_the_page_has_a_row_for_each_pass():
    """In the order in which they run."""
    assert re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M) == list(_core.passes())
