"""What Python and `math` compute with sizes, and round, follows the sizes: one graph is for all lengths."""

import copy
import math
import random
import re
import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.capture.blocks import Block
from tests.selection import each
from tests.twins import step_in_mode

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 4
LENGTHS = (5, 3, 8, 1, 12, 7, 2, 64, 101, 5)


#: Whole numbers that follow from a size.
WHOLE = {
    "half": lambda n: int(n / 2),
    "ratio": lambda n: int(0.29 * n),
    "what a mask keeps": lambda n: int(n * (1 - 0.75)),
    "rounded down by a digit": lambda n: int(n * 0.29 * 100),
    "half, floored": lambda n: int(n // 2.0),
    "half, by one less": lambda n: int((n - 1) / 2),
    "half, rounded": lambda n: round(n / 2),
    "ratio, rounded": lambda n: round(n * 0.35),
    "ceil": lambda n: math.ceil(n / 3),
    "floor": lambda n: math.floor(n * 0.7),
    "trunc": lambda n: math.trunc(n * 1.5),
    "by the size": lambda n: int(100 / n),
    "by the size, up": lambda n: math.ceil(64 / n),
    "twice": lambda n: int(int(n * 0.7) / 2) + round(int(n / 3) * 0.5),
    "difference": lambda n: n - int(n * 0.15),
    "a multiple": lambda n: math.ceil(n / 4) * 4 - n,
    "root": lambda n: int(math.sqrt(n)),
    "power": lambda n: int(n**0.5) + int(n**0.5 * 2),
    "isqrt": lambda n: math.isqrt(n),
    "bits": lambda n: math.ceil(math.log2(n)),
    "next power": lambda n: 2 ** math.ceil(math.log2(n)),
    "digits": lambda n: int(math.log10(n)) + 1,
    "logarithm": lambda n: int(math.log(n + 1)),
    "float": lambda n: int(float(n)),
    "remainder": lambda n: int(n % 2.5) + int(n // 0.1),
}


def in_parts(h, k):
    n = h.shape[0]
    return h + h.split([k % n, n - k % n])[1].sum(0) + torch.tensor_split(h, (k % n,))[0].sum(0)


#: What is done with them.
USES = {
    "bound": lambda h, k: h + h[:k].sum(0),
    "bound from the end": lambda h, k: h + h[-k - 1 :].sum(0),
    "size": lambda h, k: h + torch.ones(k, WIDTH).sum(0),
    "range": lambda h, k: h + torch.arange(k).sum(),
    "drawn": lambda h, k: h + torch.randn(k, WIDTH).sum(0) * 0,
    "index": lambda h, k: h + h[k % h.shape[0]],
    "factor": lambda h, k: h * k + k / 3,
    "view": lambda h, k: h + h.new_ones(2 * k + 2, WIDTH).view(2, k + 1, WIDTH).sum((0, 1)),
    "view of nothing": lambda h, k: h + h.new_ones(2 * k, WIDTH).view(2, k, WIDTH).sum((0, 1)),
    "rolled": lambda h, k: h + h.roll(k, 0) + h.roll(shifts=-k, dims=1),
    "rolled as a whole": lambda h, k: h + torch.roll(h, k),
    "expanded": lambda h, k: h + h[:1].expand(k, -1).sum(0),
    "repeated": lambda h, k: h + h[:1].repeat(k + 1, 1).sum(0),
    "pad": lambda h, k: h + F.pad(h, (0, 0, 0, k)).sum(0),
    "narrow": lambda h, k: h + h.narrow(0, k % h.shape[0], 1),
    "parts": in_parts,
    "greatest": lambda h, k: h + h.topk(k % h.shape[0] + 1, 0).values.sum(0),
    "sample": lambda h, k: h + h[torch.randperm(h.shape[0])[:k]].sum() * 0,
    "gathered": lambda h, k: h + h[h[:, 0].argsort()[:k]].sum(0),
    "interpolated": lambda h, k: h + F.interpolate(h.T[None], size=k + 1).sum(),
}
#: Fractions that follow from a size, and what is done with them.
FRACTIONS = {
    "sqrt": lambda n: math.sqrt(n),
    "power": lambda n: n**0.5,
    "inverse": lambda n: 1 / math.sqrt(n) + n**-0.5,
    "quotient": lambda n: 3 / n + n / 7,
    "log": lambda n: math.log(n),
    "logs": lambda n: math.log2(n) + math.log10(n) + math.log1p(n),
    "of a base": lambda n: math.log(n, 3) + math.log(5, n + 1),
    "exp": lambda n: math.exp(-n / 50),
    "waves": lambda n: math.sin(n) + math.cos(n / 3) + math.tanh(n / 9),
    "pow": lambda n: math.pow(n, 0.25) + math.fabs(-n) + math.degrees(n) * math.radians(n) / 99,
    "schedule": lambda n: 0.5 * (1 + math.cos(math.pi * n / 101)),
}
USES_OF_FRACTIONS = {
    "factor": lambda h, f: h * f,
    "divisor": lambda h, f: h / (f + 1),
    "added": lambda h, f: h + f - (f * h).mean(),
    "bounds": lambda h, f: h.clamp(-f - 1, f + 2),
    "exponent": lambda h, f: (h.abs() + 1) ** (f / 9),
    "temperature": lambda h, f: (h * f / 9).softmax(-1),
    "filled": lambda h, f: h + torch.full((WIDTH,), f),
    "of a tensor": lambda h, f: h * torch.tensor(f),
    "float64": lambda h, f: (h.double() * f).float(),
    "float16": lambda h, f: (h.half() * (f / 9)).float(),
    "integers": lambda h, f: h + torch.arange(WIDTH) * f,
    "alpha": lambda h, f: h.add(h, alpha=f),
}
#: `map` of sizes, and what is done with its numbers.
MAPS = {
    "tuple": lambda h: h + torch.ones(tuple(map(int, h.shape))),
    "generator": lambda h: h + torch.ones(tuple(int(s) for s in h.shape)),
    "list": lambda h: h + torch.ones(list(map(int, h.shape))),
    "star": lambda h: h.reshape([*map(int, h.shape), 1])[..., 0],
    "arguments": lambda h: h.new_zeros(*map(int, h.shape)) + h,
    "Size": lambda h: h.reshape(torch.Size(map(int, h.shape))),
    "sum": lambda h: h * sum(map(int, h.shape)),
    "min": lambda h: h * min(map(int, (h.shape[0] + 9, h.shape[1]))),
    "floats": lambda h: h / sum(map(float, h.shape)),
    "rounded": lambda h: h / (1 + sum(map(round, (h.shape[0] / 2, h.shape[1] / 3)))),
    "ceil": lambda h: h / sum(map(math.ceil, (h.shape[0] / 2, h.shape[1] / 3))),
    "comprehension": lambda h: h.reshape([s for s in map(int, h.shape)]),  # noqa: C416
    "two lists": lambda h: h * sum(map(max, map(int, h.shape), (1, 9))),
    "a function": lambda h: h * sum(map(lambda s: int(s / 2) + 1, h.shape)),
    "enumerated": lambda h: h * sum(i * s for i, s in enumerate(map(int, h.shape), 1)),
    "unpacked": lambda h: (lambda rows, width: h.view(width, rows).T)(*map(int, h.shape)),
}


OF_FRACTIONS = [(f, u, t) for f in FRACTIONS for u in USES_OF_FRACTIONS for t in (True, False)]


def compare(use, training=True, lengths=LENGTHS):
    torch.manual_seed(0)
    eager = Block(use, WIDTH)
    ours = ORTModule(copy.deepcopy(eager))
    for n in lengths:
        x = torch.randn(n, WIDTH)
        expected, found = (step_in_mode(module, x.clone(), training) for module in (eager, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    report = explain(ours)
    assert report.captured and not report.python_ops and not report.pytorch_calls, report
    return report.exports


def some(of):
    """One of so many, by name."""
    return lambda case: zlib.crc32("".join(map(str, case)).encode()) % of == 0


@pytest.fixture(autouse=True)
def _every_capture(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")


@each("whole, use, training", [(w, u, t) for w in WHOLE for u in USES for t in (True, False)], some(60))
def test_whole_numbers(whole, use, training):
    assert compare(lambda h: USES[use](h, WHOLE[whole](h.shape[0])), training) == 1


@each(
    "fraction, use, training",
    [(f, u, t) for f in FRACTIONS for u in USES_OF_FRACTIONS for t in (True, False)],
    some(40),
)
def test_fractions(fraction, use, training):
    assert compare(lambda h: USES_OF_FRACTIONS[use](h, FRACTIONS[fraction](h.shape[0])), training) == 1


@each("name, training", [(name, t) for name in MAPS for t in (True, False)], some(8))
def test_map(name, training):
    assert compare(MAPS[name], training) == 1


# --- to the last digit ------------------------------------------------------------------------------------------------

EXACT = {
    **WHOLE,
    "thirds": lambda n: int(n / 3 * 3) + int(7 * (3 / n) * n),
    "negative": lambda n: int(-n * 0.29) + round(-n / 2) + int(-n // 2.0),
    "tenths": lambda n: int(n // 0.1) - int(n % 0.3 * 1000) + math.floor(n * 1.1),
    "squares": lambda n: int(math.sqrt(n) * 10) + int(n**0.5 - 1),
    "powers": lambda n: int(math.log2(n) * 3) + math.floor(math.log10(n) * 7),
    "compared": lambda n: int((n > 50) * n / 3),
    "chain": lambda n: int(int(n * 0.29) * 0.71) + round(n / 4) + int((n - 1) / 2 + 0.5),
}


class Number(nn.Module):
    """The number itself, of sizes that no memory is taken for."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x, *given):
        return self.weight * self.function(x.shape[0], *given) + x[:1] * 0


def rows(n):
    return torch.zeros(1, dtype=torch.float64).expand(n)


def many_lengths():
    draw = random.Random(0)
    found = {*range(1, 70), *(draw.randint(70, 10**6) for _ in range(30)), 1000, 10**6, 2**10, 2**20, 999**2}
    return [37, *sorted(found, key=lambda n: draw.random())]


@each("name", EXACT, ("rounded down by a digit", "by the size", "squares", "powers"))
def test_python_s_rounding(name):
    module = ORTModule(Number(EXACT[name]))
    for n in many_lengths():
        assert module(rows(n)).item() == EXACT[name](n), n
    assert explain(module).exports == 1


#: Beside numbers from data, and among the arguments.
BESIDE = {
    "product": lambda n, r: int(n * r),
    "rest": lambda n, r: n - int(n * (1 - r)),
    "half": lambda n, r: int(n / 2 * r) + round(r * n),
    "quotient": lambda n, r: math.floor(n / (1 + r)) + math.ceil(r / n),
    "root": lambda n, r: int(math.sqrt(n) * r * 10),
    "logarithms": lambda n, r: int(math.log(n + 1.5) * r * 10) + int(math.cos(n) * r + 9),
    "whole": lambda n, r: int(n * 100) // int(r * 100),
    "compared": lambda n, r: 2 if n * r > -1 else 3,
}
RATIOS = (0.29, 0.71, 0.15, 0.75, 0.1, 0.3, 0.7, 0.57)


@each("name, data", [(name, data) for name in BESIDE for data in (True, False)], some(5))
def test_beside_other_numbers(name, data):
    def use(n, r):
        return BESIDE[name](n, r.item() if data else r)

    module = ORTModule(Number(use))
    for i, n in enumerate(many_lengths()):
        r = RATIOS[i % len(RATIOS)]
        given = torch.tensor(r, dtype=torch.float64) if data else r
        assert module(rows(n), given).item() == BESIDE[name](n, r), (n, r)
    assert explain(module).exports == (1 if data else 2)  # the first call is for its value


def attended(scale):
    x = torch.arange(12, dtype=torch.float64).reshape(1, 3, 4) / 9
    return F.scaled_dot_product_attention(x, x, x, scale=scale).sum()


#: Where a last digit decides, or Python raises an error: a graph for each value, and the right one.
BY_VALUE = {
    "logarithm of a base": (lambda n: int(math.log(n, 10)), (5, 1000, 7, 100)),
    "logarithm of 1": (lambda n: math.ceil(math.log(n)), (5, 1, 7, 3)),
    "digits": (lambda n: round(n / 7, 2), (5, 3, 7)),
    "gamma": (lambda n: math.gamma(n), (5, 3, 7)),
    "many": (lambda n: math.hypot(n, 1, 2), (5, 3, 7)),
    "scale": (lambda n: attended(n**-0.5), (5, 3, 7, 5)),
    "gcd": (lambda n: math.gcd(n, 6), (5, 3, 9)),
}


@each("name", BY_VALUE, ("logarithm of a base", "digits", "scale"))
def test_by_value(name):
    function, lengths = BY_VALUE[name]
    module = ORTModule(Number(function))
    for n in lengths:
        assert module(rows(n)).item() == pytest.approx(float(function(n)), rel=1e-12), n
    assert explain(module).captured


RAISING = {
    "log": lambda n: math.log(n - 3),
    "sqrt": lambda n: math.sqrt(n - 4),
    "isqrt": lambda n: math.isqrt(n - 4),
    "divided": lambda n: int(3 / (n - 3)),
    "divided, rounded": lambda n: round(n / (n - 3)) + math.ceil(n % (n - 3.0)),
    "too large": lambda n: math.exp(1000 - 100 * n),
}


@each("function", RAISING, ("log", "divided"))
def test_errors(function):
    module = ORTModule(Number(RAISING[function]))
    for n in (7, 9, 3, 8):
        try:
            expected = RAISING[function](n)
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                module(rows(n))
            continue
        assert module(rows(n)).item() == pytest.approx(expected, rel=1e-12)
