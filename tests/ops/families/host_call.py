"""Lists cases of a function of Python's as an operator: PyTorch computes it and its gradient."""

from tests.ops.cases import Case, ints, t


def two(x, w):
    return x.sin() * w, x.cumsum(-1).flatten()


def gathered(x, i):
    return x.expm1()[i]


EXACT = ("float32", "float64")

CASES = [
    Case("ortmodule::PythonOp", [t(2, 3, 4), t(4)], lambda x, w: (None, *two(x, w)), call=two, name="two",
         attrs={"number": 0, "given": 2}, outputs=(False, True, True), dtypes=EXACT),
    Case("ortmodule::PythonOp", [t(5, 3), ints(4, low=0, high=4)], lambda x, i: (None, gathered(x, i)), call=gathered,
         attrs={"number": 0, "given": 2}, outputs=(False, True), dtypes=EXACT, resize=False),
]  # fmt: skip
