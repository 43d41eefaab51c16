"""Fuzzes operators of PyTorch with drawn arguments, forward and backward, beside eager.

python -m tests.fuzz.attributes [--seconds S] [NUMBER...]
"""

import functools
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule
from tests.fuzz.loop import main
from tests.tolerances import OPERATOR

ERRORS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class Draw:
    """What functions below draw from."""

    def __init__(self, draw):
        self.draw = draw
        self.generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        self.dtype = draw.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])

    def shape(self, least=0, most=4):
        return [self.draw.choice([1, 2, 3, 4, 5, 7]) for _ in range(self.draw.randint(least, most))]

    def tensor(self, *shape, low=-2.0, high=2.0):
        x = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return x.to(self.dtype)

    def ints(self, below, *shape):
        return torch.randint(0, max(below, 1), shape, generator=self.generator)

    def axis(self, rank):
        return self.draw.randint(-rank, rank - 1)

    def axes(self, rank):
        return sorted(self.draw.sample(range(rank), self.draw.randint(1, rank)))

    def number(self):
        return self.draw.choice([0, 1, -1, 0.5, 2, 3, -0.5, 1e-3, 10, 1.5, -2])

    def flag(self):
        return self.draw.random() < 0.5

    def choice(self, *of):
        return self.draw.choice(of)

    def int(self, low, high):
        return self.draw.randint(low, high)


OPERATORS = []


def operator(function):
    """Of a Draw: a function, and the tensors it is called with."""
    OPERATORS.append(function)
    return function


@operator
def reduction(d):
    shape = d.shape(1)
    name, axes, keep = d.choice("sum", "mean", "amax", "amin", "logsumexp"), d.axes(len(shape)), d.flag()
    return lambda x: getattr(torch, name)(x, axes, keepdim=keep), d.tensor(*shape)


@operator
def spread(d):
    shape = d.shape(1)
    name, axis, by, keep = d.choice("var", "std"), d.axes(len(shape)), d.int(0, 2), d.flag()
    return lambda x: getattr(torch, name)(x, axis, correction=by, keepdim=keep), d.tensor(*shape)


@operator
def norm(d):
    shape = d.shape(1)
    p, axis = d.choice(1, 2, 0.5, 3, float("inf"), -1, "fro"), d.axes(len(shape))
    return lambda x: torch.norm(x, p, axis), d.tensor(*shape)


@operator
def softmax(d):
    shape = d.shape(1)
    f, axis = d.choice(F.softmax, F.log_softmax, F.softmin), d.axis(len(shape))
    return lambda x: f(x, axis), d.tensor(*shape, high=d.choice(2.0, 80.0))


@operator
def cumulative(d):
    shape = d.shape(1)
    f, axis = d.choice(torch.cumsum, torch.cumprod, torch.logcumsumexp), d.axis(len(shape))
    return lambda x: f(x, axis), d.tensor(*shape)


@operator
def activation(d):
    a, b = d.number(), d.number()
    f = d.choice(
        lambda x: F.elu(x, a),
        lambda x: F.leaky_relu(x, a),
        lambda x: F.celu(x, a or 1),
        lambda x: F.softplus(x, a or 1, b),
        lambda x: F.threshold(x, a, b),
        lambda x: F.hardtanh(x, min(a, b), max(a, b)),
        lambda x: F.hardshrink(x, abs(a)),
        lambda x: F.softshrink(x, abs(a)),
        lambda x: x.clamp(min(a, b), max(a, b)),
        lambda x: x.clamp(min=a),
        F.selu,
        F.mish,
        F.hardswish,
        F.hardsigmoid,
        F.relu6,
        F.logsigmoid,
        F.silu,
        F.tanhshrink,
        F.softsign,
        lambda x: F.gelu(x, approximate="tanh"),
        F.gelu,
        lambda x: x**a,
        lambda x: x.pow(abs(b) + 1),
    )
    return f, d.tensor(*d.shape())


@operator
def pointwise(d):
    shape = d.shape()
    other = d.choice(shape, shape[d.int(0, len(shape)) :], [1] * len(shape))
    f = d.choice(
        torch.add,
        torch.mul,
        torch.sub,
        torch.div,
        torch.maximum,
        torch.minimum,
        torch.atan2,
        torch.hypot,
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x.lerp(y.expand_as(x), 0.3),
        lambda x, y: x.where(y > 0, y),
        lambda x, y: torch.fmod(x, y.abs() + 1),
        lambda x, y: torch.remainder(x, y.abs() + 1),
        lambda x, y: torch.floor_divide(x, y.abs() + 1),
        lambda x, y: torch.logaddexp(x, y),
        torch.copysign,
    )
    return f, d.tensor(*shape), d.tensor(*other)


@operator
def product(d):
    n, m, k = d.int(1, 5), d.int(1, 5), d.int(1, 5)
    batch = d.shape(0, 2)
    left, right = d.choice(([*batch, n, k], [k, m]), ([*batch, n, k], [*batch, k, m]), ([n, k], [k]), ([k], [k, m]))
    return torch.matmul, d.tensor(*left), d.tensor(*right)


@operator
def contraction(d):
    n, m, k = d.int(1, 4), d.int(1, 4), d.int(1, 4)
    text, left, right = d.choice(
        ("ij,jk->ik", (n, m), (m, k)),
        ("bij,bjk->bik", (k, n, m), (k, m, n)),
        ("ij,ij->", (n, m), (n, m)),
        ("i,j->ij", (n,), (m,)),
        ("bij,kj->bki", (k, n, m), (n, m)),
        ("...i,...i->...", (n, m, k), (m, k)),
        ("ii,ij->j", (n, n), (n, m)),
    )
    return lambda x, y: torch.einsum(text, x, y), d.tensor(*left), d.tensor(*right)


@operator
def affine(d):
    n, m, k, alpha, beta = d.int(1, 5), d.int(1, 5), d.int(1, 5), d.number(), d.number()
    bias = d.choice((n, k), (k,), (1, k), (n, 1), ())
    return lambda b, x, y: torch.addmm(b, x, y, alpha=alpha, beta=beta), d.tensor(*bias), d.tensor(n, m), d.tensor(m, k)


@operator
def convolution(d):
    rank, groups = d.int(1, 2), d.choice(1, 1, 2)
    channels, out, size = groups * d.int(1, 2), groups * d.int(1, 2), d.int(3, 7)
    kernel, stride, padding, dilation = d.int(1, 3), d.int(1, 3), d.int(0, 2), d.int(1, 2)
    f = [F.conv1d, F.conv2d][rank - 1]
    x, w = d.tensor(d.int(1, 2), channels, *[size] * rank), d.tensor(out, channels // groups, *[kernel] * rank)
    return lambda x, w, b: f(x, w, b, stride, padding, dilation, groups), x, w, d.tensor(out)


@operator
def transposed_convolution(d):
    groups, stride = d.choice(1, 2), d.int(1, 3)
    channels, out, kernel = groups * d.int(1, 2), d.int(1, 2), d.int(1, 3)
    padding, extra = d.int(0, 1), d.int(0, stride - 1)
    x, w = d.tensor(1, channels, d.int(2, 5), d.int(2, 5)), d.tensor(channels, out, kernel, kernel)
    return lambda x, w: F.conv_transpose2d(x, w, None, stride, padding, extra, groups), x, w


@operator
def pooling(d):
    kernel, stride, padding, ceil = d.int(1, 3), d.int(1, 3), d.int(0, 1), d.flag()
    x, counts, size = d.tensor(1, 2, d.int(3, 8), d.int(3, 8)), d.flag(), d.int(1, 3)
    f = d.choice(
        lambda x: F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil),
        lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil_mode=ceil, count_include_pad=counts),
        lambda x: F.adaptive_avg_pool2d(x, size),
        lambda x: F.adaptive_max_pool2d(x, size),
        lambda x: F.lp_pool2d(x, 2, kernel, stride, ceil),
    )
    return f, x


@operator
def padding(d):
    mode, pads = d.choice("constant", "reflect", "replicate", "circular"), [d.int(-1, 3) for _ in range(4)]
    number = d.number()
    return lambda x: F.pad(x, pads, mode, *[number] * (mode == "constant")), d.tensor(1, 2, d.int(2, 5), d.int(2, 5))


@operator
def resizing(d):
    mode = d.choice("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    corners = d.choice(None, True, False) if mode in ("bilinear", "bicubic") else None
    how = d.choice({"size": (d.int(1, 6), d.int(1, 6))}, {"scale_factor": d.choice(0.5, 1.3, 2.0, 2.7)})
    smooth = mode in ("bilinear", "bicubic") and not corners and d.flag()
    x = d.tensor(1, 2, d.int(1, 6), d.int(1, 6))
    return lambda x: F.interpolate(x, **how, mode=mode, align_corners=corners, antialias=smooth), x


@operator
def sampling(d):
    mode, fill, corners = (
        d.choice("bilinear", "nearest", "bicubic"),
        d.choice("zeros", "border", "reflection"),
        d.flag(),
    )
    x, grid = d.tensor(1, 2, d.int(1, 5), d.int(1, 5)), d.tensor(1, 2, 3, 2, low=-1.3, high=1.3)
    return lambda x, g: F.grid_sample(x, g, mode, fill, corners), x, grid


@operator
def movement(d):
    shape = d.shape(1)
    axis, other, by = d.axis(len(shape)), d.axis(len(shape)), d.int(-3, 3)
    sizes = [d.int(1, 3) for _ in shape]
    f = d.choice(
        lambda x: x.transpose(axis, other),
        lambda x: x.roll(by, axis),
        lambda x: x.flip(axis),
        lambda x: x.repeat(sizes),
        lambda x: x.movedim(axis, other),
        lambda x: x.unsqueeze(axis),
        lambda x: x.squeeze(axis),
        lambda x: x.tile(2, 1),
        lambda x: x.flatten(),
        lambda x: x.repeat_interleave(2, axis),
        lambda x: x.narrow(axis, 0, 1),
        lambda x: x.unfold(axis, 1, 1),
        lambda x: torch.stack([x, x * 2], axis),
        lambda x: x.diff(dim=axis),
        lambda x: torch.cat([x, x], axis),
        lambda x: x.select(axis, -1),
        lambda x: x.chunk(2, axis)[0],
        lambda x: x.index_select(axis, torch.tensor([0, 0])),
        lambda x: x.expand(2, *x.shape),
    )
    return f, d.tensor(*shape)


@operator
def slicing(d):
    shape = d.shape(1)
    at = tuple(slice(d.choice(None, d.int(-4, 4)), d.choice(None, d.int(-4, 4)), d.choice(None, 1, 2)) for _ in shape)
    return lambda x: x[at], d.tensor(*shape)


@operator
def triangle(d):
    by, f = d.int(-3, 3), d.choice(torch.tril, torch.triu, torch.diagonal)
    return lambda x: f(x, by), d.tensor(d.int(1, 5), d.int(1, 5))


@operator
def order(d):
    shape = d.shape(1)
    axis, largest, descending = d.axis(len(shape)), d.flag(), d.flag()
    k = d.int(1, shape[axis])
    f = d.choice(
        lambda x: x.topk(k, axis, largest)[0],
        lambda x: x.sort(axis, descending)[0],
        lambda x: x.max(axis)[0],
        lambda x: x.kthvalue(k, axis)[0],
        lambda x: x.median(axis)[0],
        lambda x: x.argmax(axis),
        lambda x: x.cummax(axis)[0],
    )
    return f, d.tensor(*shape)


@operator
def indexing(d):
    n, m, k = d.int(1, 5), d.int(1, 5), d.int(1, 4)
    reduce, same = d.choice("sum", "mean", "amax", "amin", "prod"), d.flag()
    f = d.choice(
        lambda x, i: x[i],
        lambda x, i: x.gather(0, i[:, None].expand(-1, m)),
        lambda x, i: F.embedding(i, x),
        lambda x, i: x.scatter(0, i[:, None].expand(-1, m), 0.5),
        lambda x, i: x.index_add(0, i, x[i] * 2),
        lambda x, i: x.scatter_reduce(0, i[:, None].expand(-1, m), x[i] * 2, reduce, include_self=same),
        lambda x, i: x.take(i),
        lambda x, i: x.index_fill(0, i, 3.0),
        lambda x, i: F.embedding_bag(i[None], x, mode="mean"),
        lambda x, i: torch.take_along_dim(x, i[:, None] % m, 1),
        lambda x, i: x.index_put((i,), x[i] * 3, accumulate=same),
    )
    return f, d.tensor(n, m), d.ints(n, k)


@operator
def loss(d):
    rows, classes = d.int(1, 5), d.int(2, 6)
    how, ignored, smooth = d.choice("mean", "sum", "none"), d.choice(-100, 0, 1), d.choice(0.0, 0.1)
    f = d.choice(
        lambda x, t: F.cross_entropy(x, t, None, ignore_index=ignored, reduction=how, label_smoothing=smooth),
        lambda x, t: F.nll_loss(x.log_softmax(-1), t, ignore_index=ignored, reduction=how),
        lambda x, t: F.multi_margin_loss(x, t, reduction=how),
    )
    return f, d.tensor(rows, classes), d.ints(classes, rows)


@operator
def float_loss(d):
    shape, how, a, flag = d.shape(1), d.choice("mean", "sum", "none"), abs(d.number()) or 1, d.flag()
    f = d.choice(
        lambda x, y: F.mse_loss(x, y, reduction=how),
        lambda x, y: F.l1_loss(x, y, reduction=how),
        lambda x, y: F.smooth_l1_loss(x, y, reduction=how, beta=a),
        lambda x, y: F.huber_loss(x, y, reduction=how, delta=a),
        lambda x, y: F.kl_div(x, y, reduction=how, log_target=flag),
        lambda x, y: F.soft_margin_loss(x, y, reduction=how),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction=how),
        lambda x, y: F.poisson_nll_loss(x, y, flag),
        lambda x, y: F.cosine_similarity(x, y, -1),
    )
    return f, d.tensor(*shape), d.tensor(*shape, low=0.01, high=0.99)


@operator
def normalization(d):
    groups, size = d.int(1, 2), d.int(1, 4)
    channels, eps = groups * d.int(1, 3), d.choice(1e-5, 1e-3, 0.1)
    f = d.choice(
        lambda x, w: F.group_norm(x, groups, w, None, eps),
        lambda x, w: F.instance_norm(x, weight=w, eps=eps),
        lambda x, w: F.batch_norm(x, None, None, w, None, True, 0.1, eps),
        lambda x, w: F.layer_norm(x, x.shape[1:], eps=eps),
        lambda x, w: F.rms_norm(x, x.shape[2:], eps=eps),
        lambda x, w: F.normalize(x, 2.0, 1) * w[0],
        lambda x, w: F.local_response_norm(x, 2) * w[0],
        lambda x, w: F.prelu(x, w),
    )
    return f, d.tensor(2, channels, size, d.int(2, 4)), d.tensor(channels)


@operator
def attention(d):
    heads, n, k, width = d.int(1, 2), d.int(1, 4), d.int(1, 4), d.choice(2, 4, 8)
    causal, scale = d.flag(), d.choice(None, 0.3)
    q = d.tensor(2, heads, n, width)
    rest = d.tensor(2, heads, k, width), d.tensor(2, heads, k, width)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale), q, *rest


@operator
def recurrence(d):
    kind, both, layers = d.choice(nn.LSTM, nn.GRU, nn.RNN), d.flag(), d.int(1, 2)
    width = d.int(1, 4)
    layer = kind(width, d.int(1, 4), layers, bidirectional=both, batch_first=d.flag()).to(d.dtype)
    return layer, d.tensor(d.int(1, 3), d.int(1, 4), width)


@operator
def creation(d):
    shape, number = d.shape(1), d.number()
    f = d.choice(
        lambda x: x * torch.arange(x.shape[-1]),
        lambda x: x + torch.full_like(x, number),
        lambda x: x * torch.eye(x.shape[-1]).sum(),
        lambda x: torch.linspace(0, 1, x.shape[0]).sum() * x,
        lambda x: x.new_zeros(x.shape) + x,
        lambda x: x.masked_fill(x > 0, number),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x > 0).sum() * x,
        lambda x: x.to(torch.int32).to(x.dtype) + x,
        lambda x: x.round(decimals=1) + x,
        lambda x: x.nan_to_num(number),
        lambda x: F.one_hot((x > 0).long(), 3).sum(-1) * x,
    )
    return f, d.tensor(*shape)


def step(module, inputs):
    """(output, gradients), or an error."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    parameters = [p for p in module.parameters()]
    for p in parameters:
        p.grad = None
    try:
        y = module(*given)
        y = y[0] if isinstance(y, tuple) else y
        if y.requires_grad:
            weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)
            (y * weights).sum().backward()
    except ERRORS as error:
        return error
    return y.detach(), [x.grad for x in [*given, *parameters]]


#: How far one rounding goes.
ROUNDING = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7}


def neighbours(module, inputs, count=16):
    """PyTorch's results for inputs whose numbers are moved by up to two units of their type."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        moved = [
            x + x * ROUNDING[x.dtype] * torch.randint(-2, 3, x.shape, generator=generator)
            if x.is_floating_point()
            else x
            for x in inputs
        ]
        result = step(module, [m.to(x.dtype) for m, x in zip(moved, inputs, strict=True)])
        if not isinstance(result, Exception):
            found.append([result[0], *result[1]])
    return found


def bounds(expected):
    relative, share = (10 * x for x in OPERATOR[expected.dtype])
    scale = expected.double().nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0
    return relative, share * max(1, scale)


def same_number(ours, expected, others):
    """Whether each element is PyTorch's within the bounds. Where one is not, the function may have an edge there, on
    either side of which PyTorch's own results differ: between the least and the largest of ``others``, those of inputs
    that are a rounding away, any number will do."""
    relative, absolute = bounds(expected)
    if torch.allclose(ours.double(), expected.double(), relative, absolute, equal_nan=True):
        return True
    all_of = torch.stack([x.double() for x in [expected, *others()]])
    low, high = all_of.nan_to_num(-math.inf).min(0)[0], all_of.nan_to_num(math.inf).max(0)[0]
    room = absolute + relative * expected.double().abs()
    inside = (ours.double() >= low - room) & (ours.double() <= high + room)
    return bool((inside | (ours.isnan() & all_of.isnan().any(0))).all())


def check(ours, expected, others, what):
    if expected is None or ours is None:
        present = ours if expected is None else expected
        assert present is None or not present.nan_to_num().any(), f"{what} is {ours}, in PyTorch {expected}"
        return
    assert ours.dtype == expected.dtype and ours.shape == expected.shape, f"{what}: {ours.dtype} {list(ours.shape)}"
    if not expected.is_floating_point():
        assert torch.equal(ours, expected), f"{what} is {ours}, in PyTorch {expected}"
        return
    assert same_number(ours, expected, others), f"{what} is {ours}, in PyTorch {expected}"


def compare(module, wrapped, inputs, about):
    expected, found = step(module, inputs), step(wrapped, inputs)
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), f"{about}: PyTorch raises {expected!r}"
        return
    if isinstance(found, Exception):
        raise AssertionError(f"{about}: PyTorch does not raise") from found
    around = functools.cache(lambda: neighbours(module, inputs))
    names = ["the output", *(f"gradient {i}" for i in range(len(expected[1])))]
    for i, (a, b) in enumerate(zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True)):
        check(a, b, lambda i=i: [x[i] for x in around() if x[i] is not None], f"{about}: {names[i]}")


def of_other_sizes(d, inputs):
    """Sizes that were the same still are."""
    sizes = {n: d.choice(n, n, 1, 2, 4, 6) for x in inputs for n in x.shape}
    return [
        d.tensor(*(sizes[n] for n in x.shape))
        if x.is_floating_point()
        else d.ints(int(x.max()) + 1 if x.numel() else 1, *(sizes[n] for n in x.shape))
        for x in inputs
    ]


def case(draw):
    """What is captured for some sizes is compared at these and at others."""
    d = Draw(draw)
    make = draw.choice(OPERATORS)
    torch.manual_seed(draw.randrange(1 << 30))
    function, *inputs = make(d)
    module = Call(function) if not isinstance(function, nn.Module) else function
    wrapped = ORTModule(module)
    for given in (inputs, of_other_sizes(d, inputs)):
        compare(module, wrapped, given, f"{make.__name__} of {[list(x.shape) for x in given]} {d.dtype}")


if __name__ == "__main__":
    sys.exit(main(case, "attributes", __doc__))
