"""Lists common operators and layers, each in a small model behind a Linear.

``python -m tests.probe.common [NAME...]`` shows what runs each.
"""

import fnmatch
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule, explain
from tests.probe.layers import layers
from tests.probe.trial import as_good, difference, general, is_random, run
from tests.probe.values import SHAPE, index, random


class Behind(nn.Module):
    """`function` of a Linear's result, reshaped to `shape`."""

    def __init__(self, function, shape):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.shape = nn.Linear(6, 6), shape
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x).reshape(self.shape))


def _losses():
    like = random(*SHAPE)
    probabilities, signs = like.softmax(1), like.sign()
    binary = (like > 0).float()
    several = index(4, 6, of=6)
    labels = index(4, of=6)
    ignored = labels.clone()
    ignored[1] = -100
    weight = random(6).abs()
    for reduction in ("mean", "sum", "none"):
        yield f"mse_loss.{reduction}", lambda x, r=reduction: F.mse_loss(x, like, reduction=r)
        yield f"l1_loss.{reduction}", lambda x, r=reduction: F.l1_loss(x, like, reduction=r)
        yield f"smooth_l1_loss.{reduction}", lambda x, r=reduction: F.smooth_l1_loss(x, like, reduction=r, beta=0.5)
        yield f"huber_loss.{reduction}", lambda x, r=reduction: F.huber_loss(x, like, reduction=r, delta=0.7)
        yield f"cross_entropy.{reduction}", lambda x, r=reduction: F.cross_entropy(x, ignored, reduction=r)
        yield (
            f"cross_entropy.weight.{reduction}",
            lambda x, r=reduction: F.cross_entropy(x, labels, weight, reduction=r),
        )
        yield (
            f"cross_entropy.smooth.{reduction}",
            lambda x, r=reduction: F.cross_entropy(x, ignored, weight, reduction=r, label_smoothing=0.1),
        )
        yield (
            f"cross_entropy.probabilities.{reduction}",
            lambda x, r=reduction: F.cross_entropy(x, probabilities, weight, reduction=r, label_smoothing=0.1),
        )
        yield f"nll_loss.{reduction}", lambda x, r=reduction: F.nll_loss(x.log_softmax(1), ignored, weight, reduction=r)
        yield f"bce.{reduction}", lambda x, r=reduction: F.binary_cross_entropy(x.sigmoid(), binary, reduction=r)
        yield (
            f"bce_with_logits.{reduction}",
            lambda x, r=reduction: F.binary_cross_entropy_with_logits(
                x, binary, weight=weight, pos_weight=weight + 1, reduction=r
            ),
        )
        yield f"kl_div.{reduction}", lambda x, r=reduction: F.kl_div(x.log_softmax(1), probabilities, reduction=r)
        yield (
            f"kl_div.log.{reduction}",
            lambda x, r=reduction: F.kl_div(x.log_softmax(1), probabilities.log(), reduction=r, log_target=True),
        )
        yield (
            f"poisson_nll.{reduction}",
            lambda x, r=reduction: F.poisson_nll_loss(x, like.abs(), reduction=r, full=True),
        )
        yield (
            f"gaussian_nll.{reduction}",
            lambda x, r=reduction: F.gaussian_nll_loss(x, like, (x * x + 0.1), reduction=r, full=True),
        )
        yield f"hinge_embedding.{reduction}", lambda x, r=reduction: F.hinge_embedding_loss(x, signs, reduction=r)
        yield f"soft_margin.{reduction}", lambda x, r=reduction: F.soft_margin_loss(x, signs, reduction=r)
        yield (
            f"margin_ranking.{reduction}",
            lambda x, r=reduction: F.margin_ranking_loss(x, like, signs, margin=0.3, reduction=r),
        )
        yield (
            f"cosine_embedding.{reduction}",
            lambda x, r=reduction: F.cosine_embedding_loss(x, like, signs[:, 0], margin=0.1, reduction=r),
        )
        yield f"multi_margin.{reduction}", lambda x, r=reduction: F.multi_margin_loss(x, labels, reduction=r)
        yield f"multilabel_margin.{reduction}", lambda x, r=reduction: F.multilabel_margin_loss(x, several, reduction=r)
        yield (
            f"multilabel_soft_margin.{reduction}",
            lambda x, r=reduction: F.multilabel_soft_margin_loss(x, binary, weight, reduction=r),
        )
        yield (
            f"triplet_margin.{reduction}",
            lambda x, r=reduction: F.triplet_margin_loss(x, like, -like, swap=True, reduction=r),
        )
        yield f"ctc.{reduction}", lambda x, r=reduction: _ctc(x, r)
    yield "ctc.one", lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([1, 2]), torch.tensor(4), torch.tensor(2))
    yield "linear_cross_entropy", lambda x: F.cross_entropy(x.reshape(2, 6, 2), index(2, 2, of=6), ignore_index=3)


def _ctc(x, reduction):
    scores = x.reshape(4, 2, 3).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 2], [1, 1]]), torch.tensor([2, 2])
    return F.ctc_loss(scores, targets, torch.tensor([4, 3]), lengths, reduction=reduction, zero_infinity=True)


ACTIVATIONS = (  # noqa: SIM905
    "relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink hardtanh hardswish hardsigmoid "
    "logsigmoid leaky_relu rrelu softshrink hardshrink tanh sigmoid"
).split()
UNARY = (  # noqa: SIM905
    "abs exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan erf erfc sigmoid sign floor ceil round "
    "trunc frac square neg reciprocal sgn deg2rad rad2deg sinc i0 nan_to_num positive isnan isfinite "
    "signbit logical_not"
).split()
ABSOLUTE = (  # noqa: SIM905
    "sqrt rsqrt log log2 log10 log1p lgamma digamma logit_ acosh_ erfinv_ asin_ acos_ atanh_"
).split()
SPECIAL = (  # noqa: SIM905
    "i0e i1 i1e entr ndtr log_ndtr expit erfcx bessel_j0 gammaln psi ndtri_"
).split()
BINARY = (  # noqa: SIM905
    "add sub mul div true_divide remainder fmod maximum minimum fmax fmin atan2 hypot copysign logaddexp "
    "logaddexp2 dist eq ne lt le gt ge logical_and logical_or logical_xor isclose"
).split()


def _pointwise():
    other = random(*SHAPE)
    for name in ACTIVATIONS:
        yield f"F.{name}", getattr(F, name)
    yield "F.gelu.tanh", lambda x: F.gelu(x, approximate="tanh")
    yield "F.threshold", lambda x: F.threshold(x, 0.1, 2.0)
    yield "F.glu", lambda x: F.glu(x)
    yield "F.prelu", lambda x: F.prelu(x, torch.full((6,), 0.2))
    yield "F.rrelu.train", lambda x: F.rrelu(x, training=True)
    for name in UNARY:
        yield name, getattr(torch, name)
    for name in ABSOLUTE:
        narrow = name.endswith("_")
        f = getattr(torch, name.strip("_"))
        shift = 1.0 if name == "acosh_" else 0.0
        yield (
            name.strip("_"),
            (lambda x, f=f, s=shift: f(x.sigmoid() * 0.98 + 0.01 + s)) if narrow else (lambda x, f=f: f(x.abs() + 0.1)),
        )
    for name in SPECIAL:
        f = getattr(torch.special, name.strip("_"))
        yield f"special.{name.strip('_')}", lambda x, f=f: f(x.sigmoid() * 0.98 + 0.01)
    for n in (1, 2):
        yield f"polygamma.{n}", lambda x, n=n: torch.polygamma(n, x.abs() + 0.5)
    yield "mvlgamma", lambda x: torch.mvlgamma(x.abs() + 2, 2)
    for name in BINARY:
        yield name, lambda x, name=name: getattr(torch, name)(x, other)
        if name not in ("dist", "isclose"):
            yield f"{name}.both", lambda x, name=name: getattr(torch, name)(x[:2], x[2:] * 1.3)
    yield "pow.tensor", lambda x: torch.pow(x.abs() + 0.1, other)
    yield "pow.both", lambda x: torch.pow(x[:2].abs() + 0.1, x[2:])
    yield "pow.number", lambda x: x**3
    yield "pow.base", lambda x: 2**x
    yield "float_power", lambda x: torch.float_power(x.abs() + 0.1, 2.5)
    yield "xlogy", lambda x: torch.xlogy(x, other.abs())
    yield "xlogy.both", lambda x: torch.xlogy(x[:2], x[2:].abs() + 0.1)
    yield "xlog1py", lambda x: torch.special.xlog1py(x, other.abs())
    yield "zeta", lambda x: torch.special.zeta(torch.full((6,), 2.5), x.abs() + 1)
    yield "lerp", lambda x: torch.lerp(x, other, 0.3)
    yield "lerp.tensor", lambda x: torch.lerp(x, other, x.sigmoid())
    yield "addcmul", lambda x: torch.addcmul(x, x, other, value=0.5)
    yield "addcdiv", lambda x: torch.addcdiv(x, x, other.abs() + 1, value=0.5)
    yield "clamp", lambda x: x.clamp(-0.2, 0.3)
    yield "clamp.tensor", lambda x: torch.clamp(x, other - 0.5, other + 0.5)
    yield "where", lambda x: torch.where(x > 0, x, other)
    yield "where.number", lambda x: torch.where(x > 0, x, 0.5)
    yield "heaviside", lambda x: x * torch.heaviside(x.detach(), other)
    yield "gcd", lambda x: x * torch.gcd(index(4, 6, of=9), index(4, 6, of=7))
    yield "nextafter", lambda x: x * torch.nextafter(other, -other)
    yield "ldexp", lambda x: torch.ldexp(x, index(6, of=4))
    yield "frexp", lambda x: torch.frexp(x)[0]
    yield "masked_fill", lambda x: x.masked_fill(other > 0, -1.0)
    yield "masked_select", lambda x: x.masked_select(other > 0)
    yield "masked_scatter", lambda x: x.masked_scatter(other > 0, x * 2)
    yield "mod", lambda x: (x % 0.3) + (x.detach() // 0.7)
    yield "inplace", lambda x: x.clone().mul_(2).add_(other).clamp_(min=-1).relu_()
    yield "nan_to_num.values", lambda x: torch.nan_to_num(torch.log(x), nan=1.0, neginf=2.0)


def _reductions():
    for name in [
        "sum",
        "mean",
        "prod",
        "amax",
        "amin",
        "logsumexp",
        "var",
        "std",
        "median",
        "nanmedian",
        "max",
        "min",
        "norm",
        "nansum",
        "nanmean",
    ]:
        f = getattr(torch, name)
        if name not in ("logsumexp",):
            yield f"{name}.all", f
        if name == "norm":
            continue
        yield f"{name}.dim", lambda x, f=f: f(x, 1)
        yield f"{name}.keepdim", lambda x, f=f: f(x, 0, keepdim=True)
    for p in (0.5, 1, 2, 3, float("inf"), -float("inf"), "fro"):
        yield f"norm.{p}", lambda x, p=p: torch.norm(x, p, 1 if p != "fro" else (0, 1))
    for order in ("fro", "nuc", 2, -2, 1, float("inf")):
        yield f"linalg.matrix_norm.{order}", lambda x, o=order: torch.linalg.matrix_norm(x, o)
    for name in ["var_mean", "std_mean", "aminmax"]:
        yield name, lambda x, name=name: getattr(torch, name)(x, dim=1)
    yield "var.correction", lambda x: torch.var(x, 1, correction=0)
    for name in ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "softmax", "log_softmax"]:
        yield name, lambda x, name=name: getattr(torch, name)(x, 1)
    yield "softmin", lambda x: F.softmin(x, 1)
    yield "gumbel_softmax", lambda x: F.gumbel_softmax(x, hard=True)
    for name in ["argmax", "argmin", "argsort", "count_nonzero", "any", "all"]:
        yield name, lambda x, name=name: (getattr(torch, name)(x, dim=1), x * 2)
    yield "sort", lambda x: torch.sort(x, 1, descending=True)
    yield "topk", lambda x: torch.topk(x, 3, 1)
    yield "topk.smallest", lambda x: torch.topk(x, 2, 0, largest=False)
    yield "kthvalue", lambda x: torch.kthvalue(x, 3, 1)
    yield "mode", lambda x: torch.mode(x.round(), 1)
    yield "unique", lambda x: x * torch.unique(index(6, of=3)).sum()
    yield "msort", lambda x: torch.msort(x)
    for interpolation in ["linear", "lower", "higher", "midpoint", "nearest"]:
        yield (
            f"quantile.{interpolation}",
            lambda x, i=interpolation: torch.quantile(x, torch.tensor([0.2, 0.7]), 1, interpolation=i),
        )
    yield "quantile.number", lambda x: torch.quantile(x, 0.4)
    yield "nanquantile", lambda x: torch.nanquantile(x.log(), 0.3, 1, keepdim=True)
    yield "trapezoid", lambda x: torch.trapezoid(x, dim=1)
    yield "trapezoid.x", lambda x: torch.trapezoid(x, torch.arange(6.0) ** 2)
    yield "cumulative_trapezoid", lambda x: torch.cumulative_trapezoid(x, dx=0.5, dim=1)
    yield "cov", torch.cov
    yield "corrcoef", torch.corrcoef
    yield "diff", lambda x: torch.diff(x, 2)
    yield "gradient", lambda x: torch.gradient(x, spacing=0.5, dim=1)
    yield "histc", lambda x: x * torch.histc(random(20), 6, -1, 1)
    yield "bincount", lambda x: x * torch.bincount(index(9, of=6), minlength=6)
    yield "bucketize", lambda x: x * torch.bucketize(x.detach(), torch.tensor([-0.5, 0.0, 0.5]))
    yield "searchsorted", lambda x: x * torch.searchsorted(torch.arange(-3.0, 3), x.detach(), right=True)
    yield "renorm", lambda x: torch.renorm(x, 2, 0, 0.5)
    yield "normalize", lambda x: F.normalize(x, dim=1)
    yield "cosine_similarity", lambda x: F.cosine_similarity(x, random(*SHAPE))
    yield "pairwise_distance", lambda x: F.pairwise_distance(x, random(*SHAPE))
    for p in (1.0, 2.0, 3.0, float("inf")):
        yield f"cdist.{p}", lambda x, p=p: torch.cdist(x, random(3, 6), p)
    yield "pdist", lambda x: F.pdist(x)
    yield "local_response_norm", lambda x: F.local_response_norm(x.reshape(2, 3, 4), 2)
    yield "segment_reduce", lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([1, 3]), axis=0)


def _shapes():
    columns = index(4, 3, of=6)
    rows = torch.tensor([2, 0, 2])
    yield from {
        "reshape": lambda x: x.reshape(3, -1),
        "view": lambda x: x.view(2, 12),
        "flatten": lambda x: x.reshape(2, 3, 4).flatten(1),
        "unflatten": lambda x: x.unflatten(1, (2, 3)),
        "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
        "transpose": lambda x: x.transpose(0, 1),
        "t": lambda x: x.t() * 2,
        "permute": lambda x: x.reshape(2, 3, 4).permute(2, 0, 1),
        "movedim": lambda x: x.reshape(2, 3, 4).movedim(0, 2),
        "swapaxes": lambda x: x.swapaxes(0, 1),
        "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
        "broadcast_to": lambda x: torch.broadcast_to(x, (2, 4, 6)),
        "repeat": lambda x: x.repeat(2, 3),
        "tile": lambda x: torch.tile(x, (2,)),
        "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
        "repeat_interleave.tensor": lambda x: x.repeat_interleave(torch.tensor([1, 0, 3, 2]), 0),
        "cat": lambda x: torch.cat([x, x * 2], 1),
        "stack": lambda x: torch.stack([x, x.exp()], 1),
        "hstack": lambda x: torch.hstack([x, x]),
        "vstack": lambda x: torch.vstack([x, x]),
        "dstack": lambda x: torch.dstack([x, x]),
        "column_stack": lambda x: torch.column_stack([x, x]),
        "split": lambda x: x.split(4, 1),
        "split.sizes": lambda x: x.split([1, 5], 1),
        "chunk": lambda x: x.chunk(4, 1),
        "tensor_split": lambda x: torch.tensor_split(x, 4, 1),
        "tensor_split.places": lambda x: torch.tensor_split(x, [1, 3], 1),
        "hsplit": lambda x: torch.hsplit(x, 3),
        "vsplit": lambda x: torch.vsplit(x, 2),
        "unbind": lambda x: x.unbind(0),
        "select": lambda x: x.select(1, -2),
        "narrow": lambda x: x.narrow(1, 2, 3),
        "slice": lambda x: x[1:, ::2],
        "ellipsis": lambda x: x.reshape(2, 2, 6)[..., -1],
        "index": lambda x: x[rows],
        "index.two": lambda x: x[rows, torch.tensor([1, 1, 5])],
        "index.mask": lambda x: x[random(*SHAPE) > 0],
        "gather": lambda x: x.gather(1, columns),
        "take": lambda x: torch.take(x, columns),
        "take_along_dim": lambda x: torch.take_along_dim(x, columns, 1),
        "take_along_dim.broadcast": lambda x: torch.take_along_dim(x, columns[:1], 1),
        "index_select": lambda x: x.index_select(0, rows),
        "index_add": lambda x: x.index_add(0, rows, random(3, 6), alpha=2),
        "index_copy": lambda x: x.index_copy(0, torch.tensor([1, 3]), x[:2] * 3),
        "index_fill": lambda x: x.index_fill(1, torch.tensor([1, 3]), 2.0),
        "index_put": lambda x: x.index_put((rows,), x[:3] * 2, accumulate=True),
        "index_put.assign": lambda x: x.index_put((torch.tensor([0, 2]),), x[:2] * 2),
        "setitem": lambda x: _with_item(x),
        "scatter": lambda x: x.scatter(1, torch.tensor([[1, 2]]), x[:1, :2] * 3),
        "scatter.value": lambda x: x.scatter(1, columns, 1.5),
        "scatter_add": lambda x: x.scatter_add(1, columns, x[:, :3] * 2),
        "put": lambda x: x.put(torch.tensor([0, 5, 7]), x[0, :3] * 2),
        "put.accumulate": lambda x: x.put(torch.tensor([0, 5, 5]), x[0, :3] * 2, accumulate=True),
        "select_scatter": lambda x: x.select_scatter(x[0] * 2, 0, 2),
        "slice_scatter": lambda x: x.slice_scatter(x[:, :2] * 2, 1, 1, 5, 2),
        "diagonal_scatter": lambda x: x.diagonal_scatter(x[:, 0] * 2),
        "roll": lambda x: x.roll(2, 1),
        "roll.all": lambda x: x.roll(5),
        "roll.two": lambda x: x.roll((1, -2), (0, 1)),
        "flip": lambda x: x.flip(0, 1),
        "fliplr": torch.fliplr,
        "flipud": torch.flipud,
        "rot90": lambda x: torch.rot90(x, 1),
        "tril": torch.tril,
        "triu": lambda x: torch.triu(x, 1),
        "diag": lambda x: torch.diag(x[0]),
        "diag.of": lambda x: torch.diag(x, 1),
        "diagonal": lambda x: torch.diagonal(x, -1),
        "diag_embed": lambda x: torch.diag_embed(x),
        "diag_embed.offset": lambda x: torch.diag_embed(x, 1, 0, 2),
        "diagflat": lambda x: torch.diagflat(x[0], 1),
        "trace": torch.trace,
        "unfold": lambda x: x.unfold(1, 3, 2),
        "as_strided": lambda x: torch.as_strided(x, (3, 2), (2, 1)),
        "meshgrid": lambda x: torch.meshgrid(x[0], x[1, :3], indexing="ij"),
        "cartesian_prod": lambda x: torch.cartesian_prod(x[0], x[1]),
        "combinations": lambda x: torch.combinations(x[0], 2),
        "block_diag": lambda x: torch.block_diag(x, x[:2]),
        "atleast_3d": lambda x: torch.atleast_3d(x),
        "one_hot": lambda x: x * F.one_hot(index(4, of=6), 6),
        "nonzero": lambda x: (x * 2, torch.nonzero(random(*SHAPE) > 0)),
        "tril_indices": lambda x: x[tuple(torch.tril_indices(4, 6))],
        "constants": lambda x: x + torch.arange(6) + torch.eye(4, 6) + torch.linspace(0, 1, 6) + torch.full_like(x, 2),
        "detach": lambda x: x * x.detach(),
    }.items()
    for reduce in ["sum", "prod", "mean", "amax", "amin"]:
        for self in (True, False):
            yield (
                f"scatter_reduce.{reduce}.{self}",
                lambda x, r=reduce, s=self: x.scatter_reduce(1, columns, x[:, :3] * 2, r, include_self=s),
            )
            if reduce != "sum":
                yield (
                    f"index_reduce.{reduce}.{self}",
                    lambda x, r=reduce, s=self: x.index_reduce(0, rows, x[:3] * 1.5, r, include_self=s),
                )


def _with_item(x):
    y = x.clone()
    y[1] = 0
    y[:, 2:4] = x[:, :2] * 3
    y[torch.tensor([0, 3])] += 1
    return y


def _products():
    other = random(6, 5)
    for name, f in {
        "matmul": lambda x: x @ other,
        "mm": lambda x: torch.mm(x, other),
        "mv": lambda x: torch.mv(x, other[:, 0]),
        "bmm": lambda x: torch.bmm(x.reshape(2, 2, 6), other.expand(2, 6, 5)),
        "dot": lambda x: torch.dot(x[0], x[1]),
        "inner": lambda x: torch.inner(x, x),
        "outer": lambda x: torch.outer(x[0], x[1]),
        "addmm": lambda x: torch.addmm(other[0], x, other, beta=0.5, alpha=2),
        "addmv": lambda x: torch.addmv(x[:, 0], x, other[:, 0]),
        "addr": lambda x: torch.addr(x, x[:, 0], x[0]),
        "addbmm": lambda x: torch.addbmm(x[:2, :5], x.reshape(2, 2, 6), other.expand(2, 6, 5)),
        "baddbmm": lambda x: torch.baddbmm(x[:2, :5], x.reshape(2, 2, 6), other.expand(2, 6, 5), beta=0.5),
        "einsum": lambda x: torch.einsum("bi,ij,bj->b", x, other[:, :5] @ other.T, x),
        "tensordot": lambda x: torch.tensordot(x.reshape(2, 2, 6), other, 1),
        "kron": lambda x: torch.kron(x[:2], x[2:]),
        "cross": lambda x: torch.linalg.cross(x.reshape(8, 3), random(8, 3)),
        "multi_dot": lambda x: torch.linalg.multi_dot([x, other, other.T]),
        "matrix_power": lambda x: torch.linalg.matrix_power(x @ x.T, 3),
        "chain_matmul": lambda x: torch.chain_matmul(x, other, other.T),
        "bilinear": lambda x: F.bilinear(x, x, random(3, 6, 6)),
        "det": lambda x: torch.linalg.det(x @ x.T + torch.eye(4)),
        "slogdet": lambda x: torch.linalg.slogdet(x @ x.T + torch.eye(4)),
        "logdet": lambda x: torch.logdet(x @ x.T + torch.eye(4)),
        "inverse": lambda x: torch.inverse(x @ x.T + torch.eye(4)),
        "pinverse": lambda x: torch.pinverse(x),
        "solve": lambda x: torch.linalg.solve(x @ x.T + torch.eye(4), x),
        "cholesky": lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(4)),
        "eigh": lambda x: torch.linalg.eigvalsh(x @ x.T),
        "svdvals": lambda x: torch.linalg.svdvals(x),
        "qr": lambda x: torch.linalg.qr(x.T),
        "matrix_exp": lambda x: torch.matrix_exp(x @ x.T * 0.1),
        "fft": lambda x: torch.fft.fft(x).abs(),
        "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2),
        "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 3, 2)) ** 2),
    }.items():
        yield name, f
    for name, options in {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": random(3, 3) > -0.5},
        "float_mask": {"attn_mask": random(3, 3)},
        "scale": {"scale": 0.3},
        "dropout": {"dropout_p": 0.3},
    }.items():
        yield (
            f"sdpa.{name}",
            lambda x, o=options: F.scaled_dot_product_attention(*(x.reshape(1, 4, 3, 2) * s for s in (1, 2, 3)), **o),
        )
    yield (
        "sdpa.gqa",
        lambda x: F.scaled_dot_product_attention(
            x.reshape(1, 4, 3, 2), x.reshape(1, 4, 3, 2)[:, :2], x.reshape(1, 4, 3, 2)[:, 2:], enable_gqa=True
        ),
    )
    yield "sdpa.mask_gradient", lambda x: F.scaled_dot_product_attention(*[x.reshape(2, 4, 3)] * 3, x[:, :4])
    yield (
        "sdpa.rank3.values",
        lambda x: F.scaled_dot_product_attention(x.reshape(2, 4, 3), x.reshape(2, 4, 3), random(2, 4, 7)),
    )


def _all():
    for name, function in [*_pointwise(), *_reductions(), *_shapes(), *_products(), *_losses()]:
        yield name, (function, SHAPE)
    yield from layers()


MODELS = dict(_all())


def compare(name):
    """(what differs from PyTorch, why PyTorch ran it); both empty where all is well."""
    function, shape = MODELS[name]
    rows = max(4, torch.Size(shape).numel() // 6)
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(7)).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad():
            Behind(function, shape).eval()(x)  # constants are made before they are traced
        ours = ORTModule(Behind(function, shape), DebugOptions(log_level=LogLevel.ERROR))
        state = {k: v.clone() for k, v in ours.state_dict().items()}
        inputs = [x]
        found = _with_parameters(ours, inputs)
        after = {k: v.clone() for k, v in ours.state_dict().items()}
        ours.load_state_dict(state)
        report = explain(ours)
        plain = Behind(function, shape)
        expected = _with_parameters(plain, inputs)
        text = difference(found[0], expected[0]) or difference(found[1], expected[1])
        if text and is_random(plain, inputs):
            text = difference(found[0], expected[0], exactly=False)
        elif text and _is_exact(Behind(function, shape), x, found, expected):
            text = ""
        elif not text:
            buffers = [(k, v) for k, v in plain.state_dict().items() if k in after]
            text = next((f"{k} after the step" for k, v in buffers if not torch.allclose(v, after[k], 1e-4, 1e-5)), "")
        plain.load_state_dict(state)
    return text, "" if report.captured else general(report.fallback)


def _is_exact(module, x, found, expected):
    """Are all as good as PyTorch's, by what it computes in float64?"""
    try:
        wide = _with_parameters(module.double(), [x.detach().double().requires_grad_()])
    except Exception:  # some have constants that are float32
        return False
    return all(as_good(*three) for three in zip(found, expected, wide, strict=True))


def _with_parameters(module, inputs):
    """Results with the gradients of the input, and gradients of all parameters."""
    for p in module.parameters():
        p.grad = None
    first = run(module, inputs)
    return first, _grads(module, inputs)


def _grads(module, inputs):
    torch.manual_seed(0)
    leaves = torch.utils._pytree.tree_leaves(module(*inputs))
    # (of another sum than 0: the gradient of what is added to all would be rounding)
    loss = sum((t * torch.linspace(-1, 2, t.numel()).reshape(t.shape)).sum() for t in leaves if t.requires_grad)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return [loss.detach()] if isinstance(loss, torch.Tensor) else [], [], grads


def main():
    names = [n for n in MODELS if not sys.argv[1:] or any(fnmatch.fnmatch(n, p) for p in sys.argv[1:])]
    counts = {"native": 0, "fallback": 0, "wrong": 0}
    for name in names:
        try:
            wrong, reason = compare(name)
        except Exception as error:
            wrong, reason = f"{type(error).__name__}: {str(error)[:200]}", ""
        state = "wrong" if wrong else "fallback" if reason else "native"
        counts[state] += 1
        print(f"{state:9}{name:45}{wrong or reason}", flush=True)
    print(counts)
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
