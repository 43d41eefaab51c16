"""Tries operators on values at the edges of their type: NaN, infinities, zeros of both signs, huge numbers.

Pointwise operators get every value, or every pair of values; those over a dimension get rows that hold them among
ordinary numbers, several in a row, rows of nothing else, and rows of equal numbers. Results and gradients have to be
PyTorch's, element by element, or what PyTorch computes from the same numbers in float64. What is not compared is named
in EXCEPT, with the reason.
"""

import itertools
import math
import warnings

import torch
import torch.nn.functional as F

from ortmodule import DebugOptions, LogLevel, ORTModule, explain
from tests.probe.trial import alike, run
from tests.tolerances import OPERATOR

POINTWISE, ROWS = {}, {}


def ordinary(count, dtype):
    return torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64).to(dtype)


def values_of(dtype):
    kind = torch.finfo(dtype)
    small, large = kind.smallest_normal, kind.max
    edges = (math.nan, math.inf, 0.0, small / 4, small, large, large / 3, 1.0, 0.5, 3.0)
    return [s * v for v in edges for s in (1, -1)]


def _pointwise():
    for name in (  # noqa: SIM905
        "relu relu6 elu selu celu silu mish softplus softsign tanhshrink hardtanh hardswish hardsigmoid logsigmoid "
        "leaky_relu softshrink hardshrink gelu"
    ).split():
        yield f"F.{name}", 1, getattr(F, name)
    for name in (  # noqa: SIM905
        "abs exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan erf erfc sigmoid sign floor ceil round trunc frac "
        "square neg reciprocal sgn deg2rad rad2deg sinc nan_to_num sqrt rsqrt log log2 log10 log1p lgamma "
        "digamma logit erfinv asin acos acosh atanh isnan isfinite isinf signbit logical_not"
    ).split():
        yield name, 1, getattr(torch, name)
    for name in "i0 i0e i1 i1e entr ndtr log_ndtr ndtri erfcx".split():  # noqa: SIM905
        yield f"special.{name}", 1, getattr(torch.special, name)
    yield "F.gelu.tanh", 1, lambda x: F.gelu(x, approximate="tanh")
    yield "F.threshold", 1, lambda x: F.threshold(x, 0.1, 2.0)
    yield "F.elu.alpha", 1, lambda x: F.elu(x, 0.3)
    yield "F.celu.alpha", 1, lambda x: F.celu(x, 0.3)
    yield "F.softplus.beta", 1, lambda x: F.softplus(x, 2.0, 1.0)
    yield "F.hardtanh.bounds", 1, lambda x: F.hardtanh(x, -0.5, 3.0)
    yield "round.decimals", 1, lambda x: torch.round(x, decimals=1)
    yield "polygamma.1", 1, lambda x: torch.polygamma(1, x)
    yield "logit.eps", 1, lambda x: torch.logit(x, 0.1)
    yield "clamp", 1, lambda x: x.clamp(-0.5, 1.0)
    yield "clamp.min", 1, lambda x: x.clamp(min=0.5)
    yield "clamp.max", 1, lambda x: x.clamp(max=0.5)
    for power in (2, 3, 0.5, -1, -2, -0.5, 0, 1.5):
        yield f"pow.{power}", 1, lambda x, p=power: x**p
    for base in (2.0, 0.0, -1.5):
        yield f"rpow.{base}", 1, lambda x, b=base: b**x
    yield "remainder.number", 1, lambda x: x % 0.75
    yield "fmod.number", 1, lambda x: torch.fmod(x, 0.75)
    for name in (  # noqa: SIM905
        "add sub mul div remainder fmod maximum minimum fmax fmin atan2 hypot copysign xlogy logaddexp logaddexp2 pow "
        "float_power eq ne lt le gt ge logical_and logical_or"
    ).split():
        yield name, 2, getattr(torch, name)
    yield "special.xlog1py", 2, torch.special.xlog1py
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        yield f"F.{name}", 2, lambda x, y, name=name: getattr(F, name)(x, y, reduction="none")
    yield "F.bce_with_logits", 2, lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none")
    yield "F.kl_div", 2, lambda x, y: F.kl_div(x, y, reduction="none")
    yield "F.poisson_nll_loss", 2, lambda x, y: F.poisson_nll_loss(x, y, full=True, reduction="none")
    yield "F.prelu", 2, lambda x, y: F.prelu(x.reshape(-1, 1), y[:1])
    yield "lerp", 2, lambda x, y: torch.lerp(x, y, 0.3)
    yield "addcmul", 2, lambda x, y: torch.addcmul(x, x, y, value=0.5)
    yield "addcdiv", 2, lambda x, y: torch.addcdiv(x, x, y, value=0.5)
    yield "where", 2, lambda x, y: torch.where(x > y, x, y)
    yield "masked_fill", 2, lambda x, y: x.masked_fill(y > 0, 2.0)
    yield "clamp.tensor", 2, lambda x, y: torch.clamp(x, min=y)
    yield "clamp_min", 2, torch.clamp_min
    yield "clamp_max", 2, torch.clamp_max
    yield "clamp.tensors", 2, lambda x, y: torch.clamp(x, y, y.flip(0))
    yield "heaviside", 2, lambda x, y: x * torch.heaviside(x.detach(), y.detach())
    yield "ldexp", 2, lambda x, y: torch.ldexp(x, y)
    yield "div.floor", 2, lambda x, y: torch.div(x, y, rounding_mode="floor")
    yield "div.trunc", 2, lambda x, y: torch.div(x, y, rounding_mode="trunc")


def _rows():
    for name in (  # noqa: SIM905
        "sum mean prod amax amin max min logsumexp var std median nanmedian nansum nanmean argmax argmin any all "
        "count_nonzero cumsum cumprod logcumsumexp cummax cummin softmax log_softmax argsort mode var_mean std_mean"
    ).split():
        yield name, lambda x, name=name: getattr(torch, name)(x, dim=1)
    for name in "sum mean prod amax amin max min var std median nanmedian nansum norm aminmax".split():  # noqa: SIM905
        yield f"{name}.all", lambda x, name=name: getattr(torch, name)(x[7])
        yield f"{name}.all.ties", lambda x, name=name: getattr(torch, name)(x[-1])
    for p in (0, 0.5, 1, 1.5, 2, 3, math.inf, -math.inf, -1):
        yield f"norm.{p}", lambda x, p=p: torch.linalg.vector_norm(x, p, dim=1)
    yield "sort", lambda x: torch.sort(x, dim=1, stable=True)
    yield "sort.descending", lambda x: torch.sort(x, dim=1, descending=True, stable=True)
    yield "topk", lambda x: torch.topk(x, 3, 1)
    yield "topk.smallest", lambda x: torch.topk(x, 3, 1, largest=False)
    yield "topk.one", lambda x: torch.topk(x, 1, 1)
    for k in (1, 2, 6):
        yield f"kthvalue.{k}", lambda x, k=k: torch.kthvalue(x, k, 1)
    yield "quantile", lambda x: torch.quantile(x, 0.4, 1)
    yield "nanquantile", lambda x: torch.nanquantile(x, 0.4, 1)
    yield "var.zero", lambda x: torch.var(x, 1, correction=0)
    yield "renorm", lambda x: torch.renorm(x, 2, 0, 0.5)
    yield "F.normalize", lambda x: F.normalize(x, dim=1)
    yield "F.layer_norm", lambda x: F.layer_norm(x, (6,))
    yield "F.rms_norm", lambda x: F.rms_norm(x, (6,))
    yield "F.softmin", lambda x: F.softmin(x, 1)
    yield "F.cross_entropy", lambda x: F.cross_entropy(x, torch.arange(len(x)) % 6, reduction="none")
    yield "F.nll_loss", lambda x: F.nll_loss(x, torch.arange(len(x)) % 6, reduction="none")
    yield "F.max_pool1d", lambda x: F.max_pool1d(x, 3, 2)
    yield "F.avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2)
    yield "F.avg_pool1d.batch", lambda x: F.avg_pool1d(x[:, None], 3, 2)
    yield "F.adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2)
    yield "F.cosine_similarity", lambda x: F.cosine_similarity(x, x.flip(1), dim=1)
    yield "F.pairwise_distance", lambda x: F.pairwise_distance(x, x.flip(1))
    yield "F.glu", lambda x: F.glu(x, 1)
    yield "matmul", lambda x: x[:, :4] @ x[:4, :]
    yield "diff", lambda x: torch.diff(x, dim=1)
    yield "scatter_add", lambda x: x.scatter_add(1, torch.tensor([[0, 0, 1]] * len(x)), x[:, :3])
    for reduce in ("prod", "mean", "amax", "amin"):
        yield (
            f"scatter_reduce.{reduce}",
            lambda x, r=reduce: x.scatter_reduce(1, torch.tensor([[0, 0, 1]] * len(x)), x[:, :3], r),
        )
    for reduce in ("mean", "max", "min", "prod"):
        yield (
            f"segment_reduce.{reduce}",
            lambda x, r=reduce: torch.segment_reduce(x, r, lengths=torch.tensor([1, len(x) - 1]), axis=0),
        )


for _name, _count, _function in _pointwise():
    POINTWISE[_name] = (_function, _count)
ROWS.update(_rows())
NAMES = [*POINTWISE, *ROWS]


def pairs(dtype):
    """Every pair of values, as two tensors; the number of elements is a multiple of a vector's."""
    both = list(itertools.product(values_of(dtype), repeat=2))
    return [torch.tensor(side, dtype=torch.float64).to(dtype) for side in zip(*both, strict=True)]


def rows(dtype):
    """Rows of six."""
    kind = torch.finfo(dtype)
    nan, inf, huge = math.nan, math.inf, kind.max
    made = [ordinary(6, dtype).tolist()]
    for v in values_of(dtype):
        made.append([0.5, v, -1.5, 2.0, 0.25, -0.75])
    for a, b in [(nan, inf), (inf, inf), (inf, -inf), (-inf, -inf), (nan, nan), (0.0, 0.0), (-0.0, 0.0), (huge, huge),
                 (nan, -inf), (inf, 0.0), (nan, 0.0)]:  # fmt: skip
        made.append([0.5, a, -1.5, 2.0, b, -0.75])
    for v in (nan, inf, -inf, 0.0, -0.0, huge, 1.0, kind.smallest_normal):
        made.append([v] * 6)
    made += [[2.0, 1.0, 2.0, 1.0, 2.0, 1.0], [1.0, 1.0, 0.0, -0.0, 0.0, 1.0], [3.0, 3.0, 1.0, 1.0, 3.0, -1.0]]
    return torch.tensor(made, dtype=torch.float64).to(dtype)


# --- what is not compared ---------------------------------------------------------------------------------------------


def huge(x):
    return x.isfinite() & (x.abs() > torch.finfo(x.dtype).max / 4)


def tiny(x):
    return (x != 0) & (x.abs() <= torch.finfo(x.dtype).smallest_normal)


def whole(x):
    """Negative whole numbers."""
    return (x < 0) & (x == x.round())


def equal_ones(x):
    """Rows with equal elements."""
    ordered = x.sort(1)[0]
    first, second = ordered[:, 1:], ordered[:, :-1]
    return ((first == second) | (first.isnan() & second.isnan())).any(1, keepdim=True).expand_as(x)


OVERFLOW = "an intermediate result overflows, in PyTorch and here not in the same one"
DOUBLE = "PyTorch squares float32 in float64"
UNDEFINED = "which of equal elements is taken is not defined"
#: name -> (where an operand is so, an element, or a row, is not compared; why)
EXCEPT = {
    "digamma": (lambda x: huge(x) | whole(x), "poles"),
    "logit": (tiny, "PyTorch divides by what has no reciprocal here"),
    "xlogy": (lambda x: huge(x) | tiny(x), OVERFLOW),
    "special.xlog1py": (huge, OVERFLOW),
    "special.log_ndtr": (lambda x: huge(x) | (x == -math.inf), "PyTorch's gradient is NaN, for the exact -x"),
    "pow.-0.5": (lambda x: (x == 0) | (x == -math.inf), "the gradient is that of 1 / sqrt(x)"),
    "pow.1.5": (lambda x: x == -math.inf, "PyTorch's gradient is a root there, NaN"),
    "hypot": (huge, OVERFLOW),
    "remainder": (tiny, "PyTorch divides by what has no reciprocal here"),
    "fmod": (tiny, "PyTorch divides by what has no reciprocal here"),
    "addcmul": (huge, OVERFLOW),
    "addcdiv": (lambda x: huge(x) | tiny(x), OVERFLOW),
    "ldexp": (lambda x: huge(x) | tiny(x), OVERFLOW),
    "cumprod": (huge, OVERFLOW),
    "F.glu": (huge, OVERFLOW),
    "renorm": (huge, OVERFLOW),
    "logcumsumexp": (lambda x: huge(x) | (x == -math.inf), "PyTorch takes logarithms of gradients"),
    "F.layer_norm": (huge, OVERFLOW),
    "F.cross_entropy": (huge, "a sample keeps one number, in which that of the classes is lost"),
    **dict.fromkeys(("var", "var.zero", "std"), (huge, DOUBLE)),
    **dict.fromkeys(
        ("var_mean", "std_mean"), (lambda x: huge(x) | x.isinf(), "PyTorch's mean is NaN, unless the last is infinite")
    ),
    **dict.fromkeys(("topk", "topk.smallest", "topk.one", "kthvalue.1", "kthvalue.2", "kthvalue.6", "nanmedian"),
                    (equal_ones, UNDEFINED)),
}  # fmt: skip


#: Times the tolerance: PyTorch's trigamma is good to nine digits, and its gradient of celu has 1 / alpha in float32.
TIMES = {"digamma": 100, "F.celu.alpha": 1000}


def left_out(name, operands, like):
    """Of a tensor with the operands' elements or rows: which are not compared."""
    excepted = EXCEPT[name][0] if name in EXCEPT else torch.zeros_like
    mask = torch.stack([excepted(x).bool() for x in operands]).any(0)
    if operands[0].dtype == torch.float64:  # PyTorch has no wider type that says what is exact
        mask = torch.stack([huge(x) for x in operands]).any(0) | mask
    if name in ROWS:
        mask = mask.any(1)
        if like.dim() == 0 or len(like) != len(mask):  # it is made of one row, or of all
            return torch.zeros(like.shape, dtype=torch.bool)
        return mask.reshape([-1] + [1] * (like.dim() - 1)).expand(like.shape)
    return mask


# --- comparing --------------------------------------------------------------------------------------------------------


class Operator(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *operands):
        return self.function(*operands)


def operands_of(name, dtype):
    if name in ROWS:
        return [rows(dtype)]
    if POINTWISE[name][1] == 1:
        return [torch.tensor(values_of(dtype) * 4, dtype=torch.float64).to(dtype)]
    return pairs(dtype)


def differing(name, dtype):
    """(what differs from PyTorch, why PyTorch ran it); both empty where all is well. None: PyTorch does not have it."""
    function = ROWS[name] if name in ROWS else POINTWISE[name][0]
    module, operands = Operator(function), [x.requires_grad_() for x in operands_of(name, dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run(module, operands)
        except RuntimeError:
            return None
        exact = run(module, [x.detach().double().requires_grad_() for x in operands])
        ours = ORTModule(module, DebugOptions(log_level=LogLevel.ERROR))
        found = run(ours, operands)
    if found[1] != expected[1]:
        return f"gradients flow through {found[1]}, not {expected[1]}", ""
    texts, plain = [], [x.detach() for x in operands]
    for what, part in (("result", 0), ("gradient", 2)):
        for i, trio in enumerate(zip(found[part], expected[part], exact[part], strict=True)):
            if text := _apart(name, *trio, left_out(name, plain, trio[0]), plain):
                texts.append(f"{what} {i}: {text}")
    report = explain(ours)
    return "; ".join(texts), "" if report.captured else report.fallback


def _apart(name, found, expected, exact, ignored, operands):
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    bounds = OPERATOR.get(expected.dtype, ())
    bounds = tuple(TIMES.get(name, 1) * bound for bound in bounds)
    wrong = ~(alike(found, expected, *bounds) | alike(found, exact.to(expected.dtype), *bounds) | ignored)
    shown = []
    for place in map(tuple, wrong.nonzero()[:4].tolist()):
        at = [x[place] if x.shape == expected.shape else x[place[:1]] for x in operands]
        shown.append(f"{found[place]:.6g}, not {expected[place]:.6g}, at {[t.tolist() for t in at]}")
    return f"{int(wrong.sum())} of {wrong.numel()}: " + " | ".join(shown) if shown else ""
