"""What NumPy computes with sizes follows the sizes, in its types: one graph is for all lengths."""

import re

import numpy
import numpy as np
import pytest
from numpy import ceil, sqrt

from ortmodule import ORTModule, explain
from tests.capture.test_size_functions import LENGTHS, Number, compare, many_lengths, rows, some
from tests.capture.test_size_functions import USES as USES_OF_WHOLE
from tests.capture.test_size_functions import USES_OF_FRACTIONS as USES
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")

#: Whole numbers that follow from a size.
WHOLE = {
    "sqrt": lambda n: int(np.sqrt(n)),
    "a global": lambda n: int(ceil(sqrt(n))),
    "ceil": lambda n: int(np.ceil(n / 3)),
    "floor": lambda n: int(np.floor(n * 0.7)) + int(np.trunc(n * 0.3)),
    "rounded": lambda n: int(np.round(n * 0.35)) + int(np.rint(n / 2)) + round(np.sqrt(n)),
    "bits": lambda n: int(np.ceil(np.log2(n))),
    "next power": lambda n: 2 ** int(np.ceil(np.log2(n))),
    "digits": lambda n: int(np.log10(n)) + 1,
    "logarithm": lambda n: int(np.log(n + 1)) + int(np.floor(np.log2(n + 1) * 3)),
    "cast": lambda n: np.ceil(n / 3).astype(int),
    "cast by a type": lambda n: np.sqrt(n).astype(np.int64) + np.floor(n / 2).astype("int64"),
    "largest": lambda n: np.maximum(n - 3, 2),
    "least": lambda n: np.minimum(4, n),
    "clip": lambda n: np.clip(n - 2, 1, 6) + np.clip(n, a_min=2, a_max=None),
    "arithmetic": lambda n: np.add(n, 1) + np.multiply(n, 2) - np.subtract(n, 1) + np.floor_divide(n, 2),
    "rest": lambda n: np.remainder(n, 3) + np.mod(7, n) + np.square(n) % 5,
    "sign": lambda n: np.sign(n - 4) + np.abs(n - 6) + 1,
    "prod": lambda n: np.prod([n, 2]),
    "sum": lambda n: np.sum((n, 2, n)) + np.max([n, 3]) - np.min([n, 3]),
    "beside NumPy's": lambda n: int(n * np.float64(0.29)) + int(np.float64(1.5) * n // 2) + n // np.int64(2),
    "float32": lambda n: int(n * np.float32(0.29)) + int(np.float32(100) / n),
    "beside other sizes": lambda n: int(n * np.sqrt(n)) - int(np.sqrt(n) / n) + n // 2,
}
#: Fractions that follow from a size.
NEAR = {
    "sqrt": lambda n: np.sqrt(n),
    "inverse": lambda n: 1 / np.sqrt(n) + np.power(float(n), -0.5) + np.divide(3, n),
    "logs": lambda n: np.log(n) + np.log2(n) + np.log10(n + 1) + np.log1p(n),
    "waves": lambda n: np.sin(n) + np.cos(np.pi * n / 101) + np.tanh(n / 9) + np.arctan(n) + np.deg2rad(n),
    "exp": lambda n: np.exp(-n / 50) + np.hypot(n, 3) + np.arctan2(n, 2),
    "mean": lambda n: np.mean([n, 3]) + np.std([n, 1.5]) + np.average((n, n, 2)),
    "product": lambda n: n * np.float64(0.3) + np.float32(0.1) * n + n ** np.float64(0.5) + np.float64(1.01) ** n,
    "beside": lambda n: n / np.float64(3) + np.float64(3) / n - np.float64(2) - n % np.float64(2.5),
}
#: Of the sizes of a tensor.
OF_SHAPES = {
    "prod": lambda h: h * np.prod(h.shape),
    "of a part": lambda h: h.reshape(h.shape[0], np.prod(h.shape[1:])),
    "flat": lambda h: h.reshape(int(np.prod(h.shape))).reshape(h.shape),
    "listed": lambda h: h.reshape(np.prod(list(h.shape))).reshape(*h.shape),
    "scaled": lambda h: h / np.sqrt(np.prod(h.shape)) + np.mean(h.shape),
    "largest": lambda h: h / np.max(h.shape) + np.sum(h.size()),
}


@each("whole, use, training", [(w, u, t) for w in WHOLE for u in USES_OF_WHOLE for t in (True, False)], some(60))
def test_whole_numbers(whole, use, training):
    assert compare(lambda h: USES_OF_WHOLE[use](h, WHOLE[whole](h.shape[0])), training) == 1


@each("fraction, use, training", [(f, u, t) for f in NEAR for u in USES for t in (True, False)], some(30))
def test_fractions(fraction, use, training):
    assert compare(lambda h: USES[use](h, NEAR[fraction](h.shape[0])), training) == 1


@each("name, training", [(name, t) for name in OF_SHAPES for t in (True, False)], some(4))
def test_sizes_of_tensors(name, training):
    assert compare(OF_SHAPES[name], training) == 1


@each("name", WHOLE, ("next power", "rounded", "float32", "rest"))
def test_numpys_rounding(name):
    """As large as sizes are, to the last digit."""
    module = ORTModule(Number(WHOLE[name]))
    for n in many_lengths():
        assert module(rows(n)).item() == WHOLE[name](n), n
    assert explain(module).exports <= 2


#: What decides, is returned, or is another type than torch's: as NumPy has it, with a graph for each value or not.
AS_IT_IS = {
    "compared": lambda n: 2.0 if np.sqrt(n) > 3 else 3.0,
    "a range": lambda n: sum(range(int(np.sqrt(n)))),
    "an item": lambda n: [1.0, 2.0, 3.0][int(np.ceil(np.log2(n))) % 3],
    "type": lambda n: type(np.sqrt(n)).__name__ == "float64",
    "asked": lambda n: n if np.isfinite(n) and not np.isnan(n / 2) else 0,
    "an instance": lambda n: isinstance(np.maximum(n, 3), np.integer) + isinstance(np.sqrt(n), np.floating) * 2,
    "of zero": lambda n: float(np.nan_to_num(np.log(n - 1), neginf=-5) + np.isinf(np.log(n - 1))),
    "divided by zero": lambda n: float(np.isinf(np.float64(3) / (n - 1))),
    "wraps": lambda n: float(np.multiply(n, 2**61)),
    "narrow": lambda n: float(np.add(n, 1, dtype=np.int8)) + float(np.int8(3) + np.minimum(n, 100)),
    "power": lambda n: float(np.power(n, 40)) + float(np.power(float(n), 40)),
    "an array": lambda n: float((np.arange(3) * np.sqrt(n)).sum() + np.cumsum([n, 2])[-1]),
    "reduced": lambda n: float(np.add.reduce([n, 2]) + np.multiply.outer([n], [2.0])[0, 0]),
    "a ufunc": lambda n: n + isinstance(np.sqrt, np.ufunc) + {np.add: 2}[np.add] + np.sqrt.nin,
    "out": lambda n: float(np.sqrt(n, out=np.zeros(1))[0]),
    "type given": lambda n: float(np.sqrt(n, dtype=np.float32)),
    "digits": lambda n: float(np.round(n / 7, 2)),
    "text": lambda n: float(len(f"{np.sqrt(n)}")),
    "mod": lambda n: float(np.fmod(n, 3) + np.divmod(n, 4)[0] + np.float_power(n, 2)),
}


@each("name", AS_IT_IS, ("compared", "of zero", "divided by zero", "a ufunc"))
def test_other_numbers(name):
    module = ORTModule(Number(AS_IT_IS[name]))
    for n in (5, 3, 1, 8, 9, 64, 10, 1, 5):
        assert module(rows(n)).item() == pytest.approx(float(AS_IT_IS[name](n)), rel=1e-12, nan_ok=True), n


RETURNED = {
    "sqrt": lambda n: np.sqrt(n), "maximum": lambda n: np.maximum(n, 3), "prod": lambda n: np.prod([n, 2]),
    "float32": lambda n: np.float32(2.5) * n, "floor": lambda n: np.floor(n / 2),
    "item": lambda n: np.ceil(n / 2).item(),
}  # fmt: skip


class Returning(Number):
    def forward(self, x):
        return super().forward(x), self.function(x.shape[0])


@each("name", RETURNED, ("sqrt", "float32"))
def test_types(name):
    module = ORTModule(Returning(RETURNED[name]))
    for n in LENGTHS:
        expected, (product, found) = RETURNED[name](n), module(rows(n))
        assert type(found) is type(expected) and found == expected and product.item() == pytest.approx(float(expected))


RAISING = {
    "negative": lambda n: np.power(n, 3 - n),
    "many": lambda n: np.sqrt(n, n, n, n),
    "an index": lambda n: [1, 2, 3][np.maximum(n, 2)],
    "strict": lambda n: strictly(n),
}


def strictly(n):
    with np.errstate(all="raise"):
        return np.log(np.float64(n - 7))


@each("name", RAISING, ("negative",))
def test_errors(name):
    module = ORTModule(Number(RAISING[name]))
    for n in (2, 9, 3, 7, 8):
        try:
            expected = float(RAISING[name](n))
        except Exception as error:
            with pytest.raises(type(error), match=re.escape(str(error))):
                module(rows(n))
            continue
        assert module(rows(n)).item() == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_functions_are_as_before():
    before = dict(vars(numpy))
    compare(OF_SHAPES["scaled"], True, LENGTHS[:2])
    assert dict(vars(numpy)) == before
