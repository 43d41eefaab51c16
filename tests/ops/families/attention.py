"""Cases of csrc/ops/attention/attention.c."""

import math

import torch

from tests.ops.cases import Case, bools, t, value
from tests.ops.families.softmax import denormal


def masked_softmax(x, allowed=None):
    """A row in which nothing is left is zeros, and so is its gradient."""
    allowed = torch.ones_like(x, dtype=torch.bool) if allowed is None else allowed.expand_as(x)
    left = (allowed & (x != -math.inf)).any(-1, keepdim=True)
    scores = torch.where(left, torch.where(allowed, x, -math.inf), 0.0)
    return torch.where(left, scores.softmax(-1), 0.0)


def case(name, x, *mask, **kwargs):
    return Case("ortmodule::MaskedSoftmax", [x, *mask], masked_softmax, name=name, **kwargs)


def dropped(name, x, *mask, rate=1e-15, **kwargs):
    """With a dropout that leaves nothing to chance."""
    first = 1 + len(mask)
    nodes = (
        ("ortmodule::MaskedSoftmax", "x0 x1" if mask else "x0", "p"),
        ("Dropout", f"p x{first} x{first + 1}", "y0"),
    )

    def ref(x, *others):
        return masked_softmax(x, *others[:-2]) * (0 if rate == 1 else 1)

    inputs = [x, *mask, value(rate, "float32"), value(True, "bool")]
    const = (first, first + 1)
    return Case("ortmodule::MaskedSoftmaxDropout", inputs, ref, name=name, nodes=nodes, const=const, **kwargs)


def narrow(name, x, *mask, dtype, rate=None, op="ortmodule::MaskedSoftmax", **kwargs):
    """Stored in 16 bits (passes/softmax_cast.c), behind a dropout that leaves nothing to chance, if there is one."""
    kind = {"bfloat16": 16, "float16": 10}[dtype]
    inputs = [x, *mask] + ([] if rate is None else [value(rate, "float32"), value(True, "bool")])
    first = 1 + len(mask)
    nodes = [
        ("Cast", "x0", "w", {"to": 1}),
        (op, "w x1" if mask else "w", "p", {} if "::" in op else {"axis": -1}),
    ]
    if rate is not None:
        nodes.append(("Dropout", f"p x{first} x{first + 1}", "d"))
    nodes.append(("Cast", "p" if rate is None else "d", "y0", {"to": kind}))

    def ref(x, *others):
        y = masked_softmax(x.float(), *others[: len(mask)]) if "::" in op else x.float().softmax(-1)
        return (y * (0 if rate == 1 else 1)).to(x.dtype)

    ours = "ortmodule::NarrowSoftmax" + ("Random" if rate else "")
    const = tuple(range(first, len(inputs)))
    return Case(
        ours, inputs, ref, name=f"{name}-{dtype}", nodes=tuple(nodes), const=const, dtypes=dtype, fd=False, **kwargs
    )


INF = math.inf
ROWS = [[True, False, True], [False, False, False], [True, True, True]]

CASES = [
    case("open", t(2, 3, 5)),
    case("open", value([[0.5, -INF, 1.0], [-INF, -INF, -INF], [-INF, 3.0, -INF]]), grad=False, resize=False),
    case("special", t(4, 14, special=True), bools(4, 14)),
    case("same", t(2, 3, 5), bools(2, 3, 5)),
    case("empty-rows", t(2, 3, 3), value(ROWS, "bool"), resize=False),
    case("heads", t(2, 4, 3, 70), bools(2, 1, 3, 70), fd=False),
    case("columns", t(2, 3, 5), bools(5)),
    case("whole-rows", t(2, 3, 5), bools(2, 3, 1)),
    case("nothing", t(2, 3), value([False], "bool"), resize=False),
    case("everything", t(2, 3), value(True, "bool"), resize=False),
    case("vector", t(9), bools(9)),
    case("long", t(3, 3000), bools(3, 3000), fd=False, resize=False),
    case("no-rows", t(0, 4), bools(0, 4), resize=False),
    case("no-columns", t(4, 0), bools(4, 0), grad=False, resize=False),
    dropped("open", t(2, 3, 5)),
    dropped("open", value([[0.5, -INF, 1.0], [-INF, -INF, -INF], [-INF, 3.0, -INF]]), grad=False, resize=False),
    dropped("special", t(4, 14, special=True), bools(4, 14)),
    dropped("empty-rows", t(2, 3, 3), value(ROWS, "bool"), resize=False),
    dropped("heads", t(2, 4, 3, 70), bools(2, 1, 3, 70), fd=False),
    dropped("whole-rows", t(2, 3, 5), bools(2, 3, 1)),
    dropped("nothing-left", t(2, 3, 5), bools(5), rate=1.0),
    dropped("vector", t(9), bools(9)),
    dropped("long", t(3, 3000), bools(3, 3000), fd=False, resize=False),
    dropped("no-rows", t(0, 4), bools(0, 4), resize=False),
    dropped("no-columns", t(4, 0), bools(4, 0), grad=False, resize=False),
]
CASES += denormal("ortmodule::MaskedSoftmax", 9)
for dtype in ("bfloat16", "float16"):
    CASES += [
        narrow("plain", t(2, 3, 70), dtype=dtype, op="Softmax"),
        narrow("nothing", value([[0.5, -INF, 1.0], [-INF] * 3]), dtype=dtype, op="Softmax", grad=False, resize=False),
        narrow("special", t(4, 14, special=True), dtype=dtype, op="Softmax"),
        narrow("open", value([[0.5, -INF, 1.0], [-INF] * 3]), dtype=dtype, grad=False, resize=False),
        narrow("empty-rows", t(2, 3, 3), value(ROWS, "bool"), dtype=dtype, resize=False),
        narrow("heads", t(2, 4, 3, 70), bools(2, 1, 3, 70), dtype=dtype),
        narrow("whole-rows", t(2, 3, 5), bools(2, 3, 1), dtype=dtype),
        narrow("long", t(3, 4096), bools(3, 4096), dtype=dtype, resize=False),
        narrow("no-rows", t(0, 4), bools(0, 4), dtype=dtype, resize=False),
        narrow("no-columns", t(4, 0), dtype=dtype, grad=False, resize=False),
        narrow("dropped", t(2, 3, 70), dtype=dtype, op="Softmax", rate=1e-15),
        narrow("dropped-heads", t(2, 4, 30, 70), bools(2, 1, 30, 70), dtype=dtype, rate=1e-15),
        narrow("dropped-long", t(3, 4096), dtype=dtype, rate=1e-15, resize=False),
        narrow("nothing-left", t(2, 3, 5), bools(5), dtype=dtype, rate=1.0),
    ]
