"""Lists cases of matrix products."""

import torch

from tests.ops.cases import FLOAT, NUMBER, Case, ints, t, value


def matmul(a, b):
    return a @ b


def gemm(alpha=1.0, beta=1.0, trans_a=0, trans_b=0):
    def product(a, b, c=None):
        a, b = a.T if trans_a else a, b.T if trans_b else b
        c = a.new_zeros(()) if c is None else c
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)  # rounded once

    return product


def groups(ends, rows):
    """Slices of rows that end at `ends`; one that ends before it begins is empty."""
    found, begin = [], 0
    for end in ends.tolist():
        end = min(max(end, begin), rows)
        found.append(slice(begin, end))
        begin = end
    return found, rows - begin


def grouped(a, b, ends):
    parts, rest = groups(ends, len(a))
    products = [a[rows] @ b[e] for e, rows in enumerate(parts)]
    return torch.cat([*products, a.new_zeros(rest, b.shape[2])])


def experts(ends, *more, **kwargs):
    return Case("ortmodule::GroupedMatMul", [t(12, 6), t(4, 6, 5), value(ends, *more)], grouped, resize=False, **kwargs)


def matmul_integer(a, b, a_zero=None, b_zero=None):
    a, b = a.int(), b.int()
    if a_zero is not None:
        a = a - (a_zero.int()[:, None] if a_zero.dim() == 1 else a_zero.int())
    if b_zero is not None:
        b = b - b_zero.int()
    return a @ b


def products(*pairs, **kwargs):
    return [Case("MatMul", [t(*a), t(*b)], matmul, resize=False, **kwargs) for a, b in pairs]


def by_one_matrix(rows, inner, columns):
    """Four products that read one matrix: it is laid out for them."""
    return Case(
        "ortmodule::Prepack", [*[t(rows, inner) for _ in range(4)], t(inner, columns)],
        lambda *x: tuple(a @ x[4] for a in x[:4]), nodes=[("MatMul", f"x{i} x4", f"y{i}") for i in range(4)], const=4,
        outputs=4, name="shared", resize=False, dtypes=("bfloat16", "float16", "float32", "float64"), some_cpus=True,
    )  # fmt: skip


CASES = [
    *[by_one_matrix(*sizes) for sizes in ((6, 12, 9), (33, 70, 65), (5, 3, 8))],
    *products(
        ((5, 7), (7, 3)),
        ((7,), (7,)),
        ((7,), (7, 3)),
        ((5, 7), (7,)),
        ((2, 5, 7), (7,)),
        ((7,), (2, 7, 3)),
        ((2, 5, 7), (2, 7, 3)),
        ((2, 3, 5, 7), (2, 3, 7, 4)),
        ((2, 5, 7), (7, 3)),
        ((5, 7), (2, 7, 3)),
        ((2, 3, 5, 7), (7, 4)),
        ((4, 7), (2, 3, 7, 4)),
        ((2, 1, 5, 7), (3, 7, 4)),
        ((2, 1, 5, 7), (1, 3, 7, 4)),
        ((1, 5, 7), (3, 7, 4)),
        ((3, 5, 7), (1, 7, 4)),
        ((1, 1, 5, 7), (2, 7, 4)),
        ((1, 7), (7, 1)),
        ((6, 1), (1, 6)),
        ((1, 1), (1, 1)),
        ((3, 0), (0, 4)),
        ((0, 3), (3, 4)),
        ((3, 4), (4, 0)),
        ((0, 5, 7), (7, 3)),
        ((2, 5, 0), (0, 3)),
        ((0,), (0,)),
        dtypes=NUMBER,
    ),
    *products(((33, 130), (130, 65)), ((9, 40, 33), (9, 33, 20)), ((130, 300), (300, 97))),
    Case("MatMul", [t(4, 6, special=True), t(6, 3)], matmul, name="special"),
    Case("MatMul", [t(2, 4, 6), t(6, 3, special=True)], matmul, name="special"),
    Case("Gemm", [t(4, 5), t(5, 3)], gemm()),
    Case("Gemm", [t(4, 5), t(5, 3), t(3)], gemm(), dtypes=FLOAT + ("int64", "int32")),
    Case("Gemm", [t(4, 5), t(5, 3), t(4, 1)], gemm()),
    Case("Gemm", [t(4, 5), t(5, 3), t(1, 3)], gemm()),
    Case("Gemm", [t(4, 5), t(5, 3), t()], gemm()),
    Case("Gemm", [t(4, 5), t(5, 3), t(4, 3)], gemm()),
    Case("Gemm", [t(5, 4), t(5, 3), t(3)], gemm(trans_a=1), attrs={"transA": 1}),
    Case("Gemm", [t(4, 5), t(3, 5), t(3)], gemm(trans_b=1), attrs={"transB": 1}),
    Case(
        "Gemm",
        [t(5, 4), t(3, 5), t(3)],
        gemm(0.5, 2.0, 1, 1),
        attrs={"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1},
    ),
    Case("Gemm", [t(4, 5), t(5, 3), t(3)], gemm(beta=0.0), attrs={"beta": 0.0}),
    Case("Gemm", [t(4, 5), t(5, 3)], gemm(-1.5), attrs={"alpha": -1.5}),
    Case("Gemm", [t(0, 5), t(5, 3), t(3)], gemm()),
    Case("Gemm", [t(4, 0), t(0, 3), t(3)], gemm()),
    Case("Gemm", [t(4, 0), t(0, 3), t(3)], gemm(2.0, 3.0), attrs={"alpha": 2.0, "beta": 3.0}),
    Case("Gemm", [t(96, 200), t(70, 200), t(70)], gemm(trans_b=1), attrs={"transB": 1}),
    experts([3, 3, 8, 12], "int32", name="int32"),
    experts([0, 7, 9, 10], "int64", name="rest"),
    experts([5, 2, 40, 12], "int64", name="unsorted"),
    Case("MatMulInteger", [t(4, 5), t(5, 3)], matmul_integer, dtypes=("int8", "uint8"), grad=False),
    Case(
        "MatMulInteger",
        [ints(4, 5, high=200, dtype="uint8"), ints(5, 3, low=-100, high=100, dtype="int8")]
        + [ints(high=100, dtype="uint8"), ints(low=-5, high=5, dtype="int8")],
        matmul_integer,
        dtypes="uint8",
        grad=False,
    ),
    Case(
        "MatMulInteger",
        [ints(4, 5, high=200, dtype="uint8"), ints(5, 3, low=-100, high=100, dtype="int8")]
        + [ints(4, high=100, dtype="uint8"), ints(3, low=-5, high=5, dtype="int8")],
        matmul_integer,
        dtypes="uint8",
        grad=False,
        resize=False,
    ),
]
