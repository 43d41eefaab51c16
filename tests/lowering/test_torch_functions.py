"""Functions of torch inside a module: results, gradients and which results carry one, at several sizes.

A case is a function of an input of some shape and of parameters. It has to be captured as one graph and to give what
PyTorch gives; those in PYTORCH may be run by PyTorch as a whole, and have to be right all the same.
"""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain

SIZES = ((2, 5), (3, 7), (1, 4))  # rows and lengths of the inputs
CASES = {}


class Case(nn.Module):
    def __init__(self, function, inputs, *parameters):
        super().__init__()
        self.function, self.inputs = function, inputs
        self.parameters_ = nn.ParameterList([nn.Parameter(torch.randn(*shape) * 0.5) for shape in parameters])

    def forward(self, *inputs):
        return self.function(*inputs, *self.parameters_)


def case(name, function, inputs, *parameters):
    CASES[name] = (function, inputs, parameters)


# Inputs for n rows of length s.


def rows(n, s):
    return (torch.randn(n, s, 6),)


def images(n, s):
    return (torch.randn(n, 4, s + 4, s + 3),)


def scores(x):
    return torch.empty(x.shape[0], x.shape[1], x.shape[1])


def classes(n, s):
    return torch.randn(n, 6), torch.randint(0, 6, (n,))


def class_rows(n, s):
    return torch.randn(n, s, 6), torch.randint(0, 6, (n, s))


def indices(n, s):
    return (torch.randint(0, 9, (n, s)),)


def of(function):
    """A function of x * w."""
    return lambda x, w: function(x * w)


def each(names, home=torch):
    return [(name, getattr(home, name)) for name in names.split()]


# --- pointwise --------------------------------------------------------------------------------------------------------

UNARY = (
    "abs neg exp expm1 sin cos tan tanh sinh cosh asinh atan sigmoid square erf erfc relu sign floor ceil round trunc"
)
ACTIVATIONS = (
    "softplus silu gelu mish elu selu celu leaky_relu hardtanh hardsigmoid hardswish relu6 logsigmoid softsign"
)
BINARY = "add sub mul true_divide maximum minimum fmax fmin atan2 fmod remainder pow hypot logaddexp copysign"
for name, f in each(UNARY) + each("frac isnan isinf isfinite"):
    case(name, lambda x, w, f=f: (f(x * w), x * w), rows, (6,))
for name, f in each("sqrt rsqrt log log2 log10 log1p reciprocal digamma lgamma"):
    case(name, lambda x, w, f=f: f((x * w).abs() + 0.1), rows, (6,))
for name, f in each("acos asin atanh logit"):
    case(name, lambda x, w, f=f: f(torch.sigmoid(x * w) * 0.8 + 0.1), rows, (6,))
for name, f in each(ACTIVATIONS, F) + each("tanhshrink softshrink hardshrink", F):
    case(name, of(f), rows, (6,))
for name, f in each(BINARY):
    case(f"{name} of two", lambda x, w, f=f: f(x.abs() + 0.5, w.abs() + 0.7), rows, (6,))
for name, f in each("eq ne lt le gt ge"):
    case(name, lambda x, w, f=f: (f(x, w), x * w), rows, (6,))
for name, f in each("logical_and logical_or logical_xor"):
    case(name, lambda x, w, f=f: (f(x > 0, x < 0.3), x * w), rows, (6,))
case("acosh", of(lambda y: torch.acosh(y.abs() + 1.1)), rows, (6,))
case("gelu by tanh", of(lambda y: F.gelu(y, approximate="tanh")), rows, (6,))
case("leaky_relu 0.3", of(lambda y: F.leaky_relu(y, 0.3)), rows, (6,))
case("prelu", lambda x, w: F.prelu(x, w.abs()[:1]), rows, (6,))
case("glu", of(F.glu), rows, (6,))
case("square of", of(lambda y: y**2), rows, (6,))
case("cube of", of(lambda y: y**3), rows, (6,))
case("power of two", of(lambda y: 2**y), rows, (6,))
case("div floor", lambda x, w: torch.div(x, w, rounding_mode="floor") + w, rows, (6,))
case("div trunc", lambda x, w: torch.div(x, w, rounding_mode="trunc") + w, rows, (6,))
case("addcmul", lambda x, w: torch.addcmul(x, x, w, value=0.5), rows, (6,))
case("addcdiv", lambda x, w: torch.addcdiv(x, x, w.abs() + 1, value=0.5), rows, (6,))
case("lerp", lambda x, w: torch.lerp(x, w, 0.3), rows, (6,))
case("clamp", of(lambda y: y.clamp(-0.5, 0.5)), rows, (6,))
case("clamp from below", of(lambda y: y.clamp(min=0.1)), rows, (6,))
case("clamp by a size", of(lambda y: (y.clamp(max=y.shape[0] - 3), y.clamp_min(-y.shape[0] / 4))), rows, (6,))
case("clamp ints by a size", of(lambda y: y * (3 * y).long().clamp(max=y.shape[0] - 3)), rows, (6,))
case("clamp by one tensor", lambda x, w: (x.clamp(min=w), x.clamp(max=(x * w).mean())), rows, (6,))
case("clamp by tensors", lambda x, w: torch.clamp(x, w - 1, w + 1), rows, (6,))
case("where", lambda x, w: torch.where(x > 0, x * w, w), rows, (6,))
case("masked_fill", lambda x, w: (x * w).masked_fill(x > 0, -1e4), rows, (6,))
case("nan_to_num", of(torch.nan_to_num), rows, (6,))
case("to half and back", of(lambda y: y.half().float()), rows, (6,))
case("to bfloat16 and back", of(lambda y: (y.bfloat16() * 2).float()), rows, (6,))
case("to int", lambda x, w: ((x * 3).int(), x * w), rows, (6,))
case("type_as", lambda x, w: (x > 0).type_as(x) * w, rows, (6,))

# --- reductions -------------------------------------------------------------------------------------------------------

for dim in (None, 0, 1, -1, (0, 1), (1, 2)):
    for name, f in each("sum mean amax amin logsumexp var std prod"):
        if (name == "prod" and isinstance(dim, tuple)) or (name == "logsumexp" and dim is None):
            continue
        keywords = {} if dim is None else {"dim": dim}
        case(f"{name} over {dim}", of(lambda y, f=f, k=keywords: f(y, **k)), rows, (6,))
    case(f"vector_norm over {dim}", of(lambda y, d=dim: torch.linalg.vector_norm(y, dim=d)), rows, (6,))
case("max of all", of(torch.max), rows, (6,))
case("max over 1", of(lambda y: tuple(y.max(1))), rows, (6,))
case("min over -1", of(lambda y: tuple(y.min(-1))), rows, (6,))
case("argmax", of(lambda y: (y.argmax(-1), y)), rows, (6,))
case("argmin of all", of(lambda y: (y.argmin(), y)), rows, (6,))
case("median", of(lambda y: y.median(1)[0]), rows, (6,))
case("any and all", lambda x, w: ((x > 0).any(1), (x > 0).all(-1), (x > -9).all(), x * w), rows, (6,))
case("var by n", of(lambda y: y.var(-1, unbiased=False)), rows, (6,))
case("var_mean", of(lambda y: torch.var_mean(y, -1)), rows, (6,))
case("var_mean.keepdim", of(lambda y: torch.var_mean(y, -1, keepdim=True)), rows, (6,))
case("std_mean", of(lambda y: torch.std_mean(y, -1)), rows, (6,))
case("nansum", of(torch.nansum), rows, (6,))
case("norm 1", of(lambda y: y.norm(p=1, dim=-1)), rows, (6,))
case("norm inf", of(lambda y: torch.linalg.vector_norm(y, math.inf, -1)), rows, (6,))
case("norm", of(torch.norm), rows, (6,))
for name, f in each("cumsum cumprod logcumsumexp"):
    case(name, of(lambda y, f=f: f(y, 1)), rows, (6,))
case("cummax", of(lambda y: torch.cummax(y, 1)[0]), rows, (6,))
case("topk", of(lambda y: tuple(y.topk(2, -1))), rows, (6,))
case("sort", of(lambda y: tuple(y.sort(-1))), rows, (6,))
case("sort descending", of(lambda y: tuple(y.sort(1, descending=True))), rows, (6,))
case("argsort", of(lambda y: (y.argsort(-1), y)), rows, (6,))
case("softmax", of(lambda y: F.softmax(y, 1)), rows, (6,))
case("softmax in float64", of(lambda y: F.softmax(y, -1, dtype=torch.float64).float()), rows, (6,))
case("log_softmax", of(lambda y: F.log_softmax(y, -1)), rows, (6,))
case("normalize", of(lambda y: F.normalize(y, dim=-1)), rows, (6,))
case("cosine_similarity", lambda x, w: F.cosine_similarity(x, w, dim=-1), rows, (6,))
case("pairwise_distance", lambda x, w: F.pairwise_distance(x, x * w), rows, (6,))
case("cdist", lambda x, w: torch.cdist(x, x * w), rows, (6,))

# --- shapes -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "view": lambda y: y.view(y.shape[0], -1),
    "reshape": lambda y: y.reshape(-1, 3, 2),
    "flatten": lambda y: y.flatten(1),
    "unflatten": lambda y: y.unflatten(-1, (2, 3)),
    "permute": lambda y: y.permute(2, 0, 1),
    "contiguous": lambda y: y.transpose(1, 2).contiguous(),
    "mT": lambda y: y.mT,
    "T": lambda y: y[0].T,
    "unsqueeze": lambda y: y.unsqueeze(1),
    "squeeze": lambda y: y[..., :1].squeeze(-1),
    "repeat": lambda y: y.repeat(1, 2, 1),
    "repeat_interleave": lambda y: y.repeat_interleave(2, 1),
    "repeat_interleave flat": lambda y: y.repeat_interleave(3),
    "repeat_interleave by a tensor": lambda y: torch.repeat_interleave(y, torch.tensor([1, 2, 1, 2, 1, 3]), -1),
    "tile": lambda y: torch.tile(y, (2, 1, 1)),
    "cat": lambda y: torch.cat([y, y * 2], 1),
    "cat with ones": lambda y: torch.cat([torch.ones(y.shape[0], 1, 6), y], 1),
    "stack": lambda y: torch.stack([y, y * 2], 1),
    "hstack": lambda y: torch.hstack([y, y * 2]),
    "split": lambda y: y.split(2, -1),
    "split by sizes": lambda y: y.split([1, 5], -1),
    "chunk": lambda y: y.chunk(3, -1),
    "chunk of a length": lambda y: y.chunk(2, 1)[0],
    "unbind": lambda y: y.unbind(-1),
    "tensor_split": lambda y: y.tensor_split(3, -1),
    "roll": lambda y: y.roll((1, -2), (1, 2)),
    "flip": lambda y: y.flip([0, -1]),
    "rot90": lambda y: torch.rot90(y, 1, (1, 2)),
    "movedim": lambda y: y.movedim(0, -1),
    "swapaxes": lambda y: y.swapaxes(0, 1),
    "narrow": lambda y: y.narrow(-1, 1, 3),
    "diag_embed": torch.diag_embed,
    "diagonal": lambda y: (y.mT @ y).diagonal(dim1=-2, dim2=-1),
    "diagonal 1": lambda y: (y.mT @ y).diagonal(1, -2, -1),
    "diagonal -2": lambda y: y.diagonal(-2, 1, 2),
    "tril": torch.tril,
    "triu": lambda y: y.triu(1),
    "unfold": lambda y: y.unfold(-1, 3, 1),
    "unfold a length": lambda y: y.unfold(1, 2, 2),
    "diff": lambda y: torch.diff(y, dim=-1),
    "expand": lambda y: y[:, :1].expand(y.shape[0], y.shape[1], 6) + 0,
    "index": lambda y: y[:, 0] + y[:, -1],
    "slice": lambda y: y[:, 1:-1:2],
    "new dimensions": lambda y: y[:, None, :, None],
    "index by a tensor": lambda y: y[:, torch.tensor([0, 1, 0])],
    "index by two tensors": lambda y: y[torch.arange(y.shape[0]), y.sum(-1).argmax(-1)],
    "index by two, last": lambda y: y[:, torch.tensor([0, 1]), torch.tensor([2, 3])],
    "index by two, apart": lambda y: y[torch.tensor([0, 0]), :, torch.tensor([2, 3])],
    "index_select": lambda y: y.index_select(-1, torch.tensor([0, 3, 3])),
    "gather": lambda y: y.gather(-1, torch.zeros_like(y).long()[..., :2] + 1),
    "take": lambda y: torch.take(y, torch.tensor([0, 3])),
    "take_along_dim": lambda y: torch.take_along_dim(y, y.argsort(-1), -1),
    "scatter_add": lambda y: torch.zeros_like(y).scatter_add(-1, torch.zeros_like(y).long(), y),
    "scatter": lambda y: torch.zeros_like(y).scatter(-1, (y * 0).long() + torch.arange(6), y),
    "index_add": lambda y: torch.zeros(y.shape[0], 3, 6).index_add(1, torch.ones(y.shape[1], dtype=torch.long), y),
    "selected by a mask": lambda y: y[y > 0].sum(),
    "masked_select": lambda y: y.masked_select(y > 0).mean(),
    "full_like": lambda y: torch.full_like(y, 3.0) * y,
    "arange": lambda y: torch.arange(y.shape[1])[None, :, None] * y,
    "linspace": lambda y: torch.linspace(0, 1, 6) * y,
    "eye": lambda y: torch.eye(6) * y[0, 0],
    "new_full": lambda y: y.new_full((y.shape[0], 1, 6), 2.0) * y,
    "bucketize": lambda y: (torch.bucketize(y, torch.tensor([-0.5, 0.0, 0.5])), y),
    "searchsorted": lambda y: (torch.searchsorted(torch.tensor([-0.5, 0.0, 0.5]), y), y),
}
for name, function in SHAPES.items():
    case(name, of(function), rows, (6,))
case("squeeze rows", of(lambda y: y.squeeze(0)), rows, (6,))
case("squeeze all", of(lambda y: y.sum(-1, keepdim=True).squeeze()), rows, (6,))
case("broadcast_to", lambda x, w: torch.broadcast_to(w, x.shape) * x, rows, (6,))
case("outer", lambda x, w: torch.outer(w, w) * x.sum(), rows, (6,))
case("one_hot", lambda x, w: F.one_hot((x[..., 0] > 0).long(), 3).float() @ w, rows, (3, 4))
case("embedding", lambda i, w: F.embedding(i, w), indices, (9, 4))
case("embedding with padding", lambda i, w: F.embedding(i, w, padding_idx=1), indices, (9, 4))
case("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="mean"), indices, (9, 4))
for name, f in each("pixel_shuffle channel_shuffle", F):
    case(name, lambda x, f=f: f(x * 1, 2), images)


# --- changes in place -------------------------------------------------------------------------------------------------


def in_place(change):
    """The function that changes y = x * w, and returns y."""

    def function(x, w):
        y = x * w
        change(y, x, w)
        return y

    return function


IN_PLACE = {
    "add_": lambda y, x, w: y.add_(1).mul_(x),
    "relu_": lambda y, x, w: F.relu(y, inplace=True),
    "masked_fill_": lambda y, x, w: y.masked_fill_(x > 0, 0),
    "a row": lambda y, x, w: y[:, 0].mul_(2),
    "a slice": lambda y, x, w: y[..., 1:3].add_(w[1:3]),
    "fill_": lambda y, x, w: y[:, 0].fill_(2.0),
    "copy_": lambda y, x, w: y[:, 0].copy_(w),
    "assigned row": lambda y, x, w: y.__setitem__((slice(None), 0), w),
    "assigned slice": lambda y, x, w: y.__setitem__((..., slice(1, 3)), 0.0),
    "assigned by a mask": lambda y, x, w: y.__setitem__(x > 0, 0.0),
    "a number by a mask of rows": lambda y, x, w: y.__setitem__(x.sum(-1) > 0, 2.0),
    "a vector by a mask of rows": lambda y, x, w: y.__setitem__(x.sum(-1) > 0, w * 2),
    "its own rows by a mask": lambda y, x, w: y.__setitem__(x.sum(-1) > 0, y[x.sum(-1) > 0] * w),
    "a mask of columns": lambda y, x, w: y.__setitem__((slice(None), x[0].sum(-1) > 0), w[0]),
    "a mask of numbers": lambda y, x, w: y.__setitem__((x.sum(-1) > 0).to(torch.uint8), w),
    "a matrix by a mask": lambda y, x, w: y.__setitem__(x[:, 0, 0] > 0, x[0]),
    "through a view": lambda y, x, w: y.view(-1).add_(1),
    "through a transpose": lambda y, x, w: y.transpose(1, 2)[:, 0].zero_(),
}
for name, change in IN_PLACE.items():
    case(f"in place: {name}", in_place(change), rows, (6,))

# --- products ---------------------------------------------------------------------------------------------------------

case("linear", lambda x, w, b: F.linear(x, w, b), rows, (5, 6), (5,))
case("linear without bias", lambda x, w: F.linear(x, w), rows, (5, 6))
case("matmul", lambda x, w: x @ w, rows, (6, 5))
case("matmul with a vector", lambda x, w: x @ w, rows, (6,))
case("bmm", lambda x, w: torch.bmm(x, (x * w).mT), rows, (6,))
case("mm", lambda x, w: torch.mm(x[0], w), rows, (6, 5))
case("mv", lambda x, w: torch.mv(x[0], w), rows, (6,))
case("dot", lambda x, w: torch.dot(x[0, 0], w), rows, (6,))
case("addmm", lambda x, w, b: torch.addmm(b, x[0], w, beta=0.5, alpha=2), rows, (6, 5), (5,))
case("baddbmm", lambda x, w: torch.baddbmm(x @ x.mT, x, (x * w).mT, beta=0.5, alpha=0.3), rows, (6,))
case("addbmm", lambda x, w: torch.addbmm(torch.zeros(x.shape[1], x.shape[1]), x, (x * w).mT), rows, (6,))
case("addmv", lambda x, w: torch.addmv(x[0, 0], w, x[0, 1], beta=0.5, alpha=2), rows, (6, 6))
case("addmm of nothing", lambda x, w: torch.addmm(torch.empty(5), x[0], w, beta=0), rows, (6, 5))
case("addmv of nothing", lambda x, w: torch.addmv(torch.empty(6), w, x[0, 1], beta=0, alpha=2), rows, (6, 6))
case("addr of NaN", lambda x, w: torch.addr(torch.full((6, 6), math.nan), w, x[0, 0], beta=0), rows, (6,))
case("addbmm of NaN", lambda x, w: torch.addbmm(torch.full((1, 1), math.nan), x, (x * w).mT, beta=0), rows, (6,))
case("baddbmm of nothing", lambda x, w: scores(x).baddbmm(x, (x * w).mT, beta=0, alpha=0.3), rows, (6,))
case("baddbmm_ of nothing", lambda x, w: scores(x).baddbmm_(x, (x * w).mT, beta=0), rows, (6,))
case("addmm of a parameter", lambda x, w, b: torch.addmm(b, x[0], w, beta=0), rows, (6, 5), (5,))
case("einsum", lambda x, w: torch.einsum("bsd,de->bse", x, w), rows, (6, 5))
case("einsum of rows", lambda x, w: torch.einsum("bid,bjd->bij", x, x * w), rows, (6,))
case("einsum of three", lambda x, w: torch.einsum("bhd,kd,h->bk", x[:, :2], w, w[0, :2]), rows, (5, 6))
case("einsum transpose", of(lambda y: torch.einsum("...ij->...ji", y)), rows, (6,))
case("tensordot", lambda x, w: torch.tensordot(x, w, dims=1), rows, (6, 5))
case("bilinear", lambda x, w, b: F.bilinear(x, x, w, b), rows, (3, 6, 6), (3,))
case("cross", lambda x, w: torch.linalg.cross(x[..., :3], (x * w)[..., 3:]), rows, (6,))

# --- attention --------------------------------------------------------------------------------------------------------


def heads(n, s):
    return torch.randn(n, 2, s, 4), torch.randn(n, 2, s + 1, 4), torch.randn(n, 2, s + 1, 4)


def attention(mask=None, **keywords):
    def function(q, k, v, w):
        more = {} if mask is None else {"attn_mask": mask(q, k)}
        return F.scaled_dot_product_attention(q * w, k, v, **keywords, **more)

    return function


def columns(q, k):
    return (torch.arange(k.shape[2]) < 2)[None, None, None].expand(q.shape[0], 1, q.shape[2], -1)


def whole_rows(q, k):
    return (torch.arange(q.shape[2]) < 2)[None, None, :, None].expand(q.shape[0], 1, -1, k.shape[2])


def infinite(q, k):
    return torch.zeros(q.shape[2], k.shape[2]).masked_fill(torch.arange(k.shape[2]) > 1, -math.inf)


case("attention", attention(), heads, (4,))
case("attention, scaled", attention(scale=0.3), heads, (4,))
case("attention, causal", attention(is_causal=True), heads, (4,))
case("attention, some columns", attention(columns), heads, (4,))
case("attention, some rows", attention(whole_rows), heads, (4,))
case("attention, minus infinity", attention(infinite), heads, (4,))
case(
    "attention with a bias",
    lambda q, k, v, w, b: F.scaled_dot_product_attention(q * w, k, v, attn_mask=q @ k.mT * b),
    heads,
    (4,),
    (1,),
)
case(
    "attention in groups",
    attention(enable_gqa=True),
    lambda n, s: (torch.randn(n, 4, s, 4), torch.randn(n, 2, s, 4), torch.randn(n, 2, s, 4)),
    (4,),
)
case("attention of rank 3", attention(), lambda n, s: (torch.randn(n, s, 4),) * 3, (4,))
case(
    "multi_head_attention",
    lambda x, a, b, c, d: F.multi_head_attention_forward(x, x, x, 6, 2, a, b, None, None, False, 0.0, c, d),
    lambda n, s: (torch.randn(s, n, 6),),
    (18, 6),
    (18,),
    (6, 6),
    (6,),
)

# --- normalisation, convolution, pooling ------------------------------------------------------------------------------

case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), rows, (6,), (6,))
case("layer_norm without weight", of(lambda y: F.layer_norm(y, (6,))), rows, (6,))
case("layer_norm without bias", lambda x, w: F.layer_norm(x, (6,), w), rows, (6,))
case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w), rows, (6,))
case("rms_norm with epsilon", lambda x, w: F.rms_norm(x, (6,), w, 1e-3), rows, (6,))
case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), images, (4,), (4,))
case("group_norm without weight", lambda x, w: F.group_norm(x * w.view(1, 4, 1, 1), 2), images, (4,))
case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), images, (4,), (4,))
case("batch_norm of the batch", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), images, (4,), (4,))
case("local_response_norm", lambda x: F.local_response_norm(x, 2), images)
case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), images, (5, 4, 3, 3), (5,))
case("conv2d, strided", lambda x, w: F.conv2d(x, w, stride=2), images, (5, 4, 3, 3))
case("conv2d, dilated", lambda x, w: F.conv2d(x, w, dilation=2, padding=2), images, (5, 4, 3, 3))
case("conv2d, in groups", lambda x, w: F.conv2d(x, w, groups=2), images, (6, 2, 3, 3))
case("conv2d, same size", lambda x, w: F.conv2d(x, w, padding="same"), images, (5, 4, 3, 3))
case("conv1d", lambda x, w: F.conv1d(x.mT, w, padding=1), rows, (5, 6, 3))
case("conv3d", lambda x, w: F.conv3d(x[:, :, None], w), images, (5, 4, 1, 3, 3))
case("conv_transpose1d", lambda x, w: F.conv_transpose1d(x.mT, w), rows, (6, 5, 3))
case(
    "conv_transpose2d",
    lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
    images,
    (4, 5, 3, 3),
    (5,),
)
IMAGES = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool2d, padded": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max_pool2d with indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool2d, padded": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d, ceiled": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 1),
    "lp_pool2d": lambda x: F.lp_pool2d(x.abs() + 0.1, 2, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "interpolate to a size": lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] * 2), mode="nearest"),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
    "interpolate, aligned": lambda x: F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=True),
    "interpolate, bicubic": lambda x: F.interpolate(x, size=(9, 9), mode="bicubic"),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=3.0),
    "pad, reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "pad, replicated": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pad, circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "pad, circular and cut": lambda x: F.pad(x, (2, -1, -1, 1), mode="circular"),
    "pad, circular of all": lambda x: F.pad(x, (x.shape[3], 0, 2, x.shape[2]), mode="circular"),
    "pad, cut": lambda x: F.pad(x, (-1, 0)),
    "unfold of images": lambda x: F.unfold(x, 2),
    "grid_sample": lambda x: F.grid_sample(x, torch.tanh(x[:, :2].permute(0, 2, 3, 1)), align_corners=False),
}
for name, function in IMAGES.items():
    case(name, lambda x, f=function: f(x * 1), images)
case(
    "fold", lambda x: F.fold(F.unfold(x, 2, stride=2) * 1, (8, 6), 2, stride=2), lambda n, s: (torch.randn(n, 4, 8, 6),)
)

# --- losses -----------------------------------------------------------------------------------------------------------

WEIGHTS = torch.arange(1.0, 7)
CROSS_ENTROPY = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weighted": {"weight": WEIGHTS},
    "ignoring": {"ignore_index": 2},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed, weighted, ignoring": {"label_smoothing": 0.1, "weight": WEIGHTS, "ignore_index": 1},
    "smoothed sum": {"label_smoothing": 0.1, "reduction": "sum", "ignore_index": 1},
    "smoothed, none": {"label_smoothing": 0.1, "reduction": "none", "ignore_index": 1},
}
for name, keywords in CROSS_ENTROPY.items():
    case(f"cross_entropy, {name}", lambda x, t, w, k=keywords: F.cross_entropy(x * w, t, **k), classes, (6,))
    case(
        f"cross_entropy of rows, {name}",
        lambda x, t, w, k=keywords: F.cross_entropy((x * w).mT, t, **k),
        class_rows,
        (6,),
    )
case("cross_entropy, soft", lambda x, t, w: F.cross_entropy(x * w, F.softmax(x, -1)), classes, (6,))
case(
    "cross_entropy, soft and smoothed",
    lambda x, t, w: F.cross_entropy(x * w, F.softmax(x, -1), label_smoothing=0.2, weight=WEIGHTS),
    classes,
    (6,),
)
LOSSES = {
    "nll_loss": lambda y, x, t: F.nll_loss(F.log_softmax(y, -1), t),
    "mse_loss": lambda y, x, t: F.mse_loss(y, x + 1),
    "l1_loss": lambda y, x, t: F.l1_loss(y, x + 1),
    "smooth_l1_loss": lambda y, x, t: F.smooth_l1_loss(y, x + 1, beta=0.5),
    "huber_loss": lambda y, x, t: F.huber_loss(y, x + 1),
    "binary_cross_entropy": lambda y, x, t: F.binary_cross_entropy(torch.sigmoid(y), (x > 0).float()),
    "with_logits": lambda y, x, t: F.binary_cross_entropy_with_logits(y, (x > 0).float()),
    "with_logits, weighted": lambda y, x, t: F.binary_cross_entropy_with_logits(
        y, (x > 0).float(), weight=x.abs().detach(), pos_weight=WEIGHTS
    ),
    "kl_div": lambda y, x, t: F.kl_div(F.log_softmax(y, -1), F.softmax(x, -1), reduction="batchmean"),
    "kl_div of logarithms": lambda y, x, t: F.kl_div(
        F.log_softmax(y, -1), F.log_softmax(x, -1), log_target=True, reduction="sum"
    ),
    "margin_ranking_loss": lambda y, x, t: F.margin_ranking_loss(y, x, torch.sign(x)),
    "triplet_margin_loss": lambda y, x, t: F.triplet_margin_loss(y, x, x + 1),
    "cosine_embedding_loss": lambda y, x, t: F.cosine_embedding_loss(y, x, torch.ones(x.shape[0])),
    "hinge_embedding_loss": lambda y, x, t: F.hinge_embedding_loss(y, torch.sign(x)),
    "poisson_nll_loss": lambda y, x, t: F.poisson_nll_loss(y, x.abs()),
    "gaussian_nll_loss": lambda y, x, t: F.gaussian_nll_loss(y, x, x.abs() + 0.1),
    "multi_margin_loss": lambda y, x, t: F.multi_margin_loss(y, t),
    "soft_margin_loss": lambda y, x, t: F.soft_margin_loss(y, torch.sign(x.detach())),
    "multilabel_soft_margin_loss": lambda y, x, t: F.multilabel_soft_margin_loss(y, (x > 0).float()),
}
for name, function in LOSSES.items():
    case(name, lambda x, t, w, f=function: f(x * w, x, t), classes, (6,))

#: Not in ONNX, or not in the engine.
PYTORCH = {"searchsorted", "embedding_bag", "fold", "multi_margin_loss"}
#: Whose Python asks whether a size is one: that size has a graph of its own.
TWO_GRAPHS = {"squeeze rows", "squeeze all"}


def run(module, inputs):
    """Results, which of them carry a gradient, and all gradients."""
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    results = module(*inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    generator = torch.Generator().manual_seed(3)
    loss = sum((t.float() * torch.randn(t.shape, generator=generator)).sum() for t in results if t.requires_grad)
    module.zero_grad()
    loss.backward()
    # A gradient of zeros and none at all are the same to who computes it.
    grads = [
        torch.zeros_like(t) if t.grad is None else t.grad for t in (*module.parameters(), *inputs) if t.requires_grad
    ]
    return [t.detach() for t in results], [t.requires_grad for t in results], grads


@pytest.mark.parametrize("name", CASES)
def test_function(name):
    function, make, parameters = CASES[name]
    torch.manual_seed(1)
    eager = Case(function, make, *parameters)
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n, s in SIZES:
            inputs = make(n, s)
            torch.testing.assert_close(run(ours, inputs), run(eager, inputs), rtol=1e-4, atol=2e-5, equal_nan=True)
    report = explain(ours)
    assert report.captured or name in PYTORCH, report.fallback
    if report.captured:
        assert report.exports == (2 if name in TWO_GRAPHS else 1)
        assert not report.aten_ops
