"""Cases of csrc/ops/attention/rotary.c."""

import torch

from tests.ops.cases import Case, t


def rotary(x, c, s, inverse=False):
    x1, x2 = x.chunk(2, -1)
    c1, c2 = c.expand(*c.shape[:-1], x.shape[-1]).chunk(2, -1)
    s1, s2 = s.expand(*s.shape[:-1], x.shape[-1]).chunk(2, -1)
    if inverse:
        return torch.cat([x1 * c1 + x2 * s2, x2 * c2 - x1 * s1], -1)
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2], -1)


def case(name, x, *angles, **kwargs):
    angles = [t(*shape, grad=False) for shape in angles]
    return Case("ortmodule::Rotary", [x, *angles], rotary, name=name, resize=False, **kwargs)


CASES = [
    case("heads", t(2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)),
    case("rows", t(7, 6), (7, 6), (6,)),
    case("one-row", t(70), (70,), (70,)),
    case("one-angle", t(3, 4), (1,), (3, 1)),
    case("of-each-batch", t(2, 3, 5, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
    case("wide", t(3, 2, 130), (3, 1, 130), (2, 130), fd=False),
    case("no-rows", t(0, 4), (4,), (4,)),
    case("empty-rows", t(3, 0), (0,), (0,)),
    case("pieces", t(2, 5, 3, 32), (5, 1, 32), (5, 1, 32), fd=False),
    case("special", t(3, 6, special=True), (6,), (6,)),
    *(
        Case(
            "ortmodule::Rotary",
            [t(2, 5, 3, width), *[t(5, 1, width, dtype="float32", grad=False)] * 2],
            lambda x, c, s: rotary(x, c, s).type(x.dtype),
            dtypes=("bfloat16", "float16"),
            name="float32-angles",
            resize=False,
        )
        for width in (6, 48)
    ),
    *(
        Case(
            "ortmodule::Rotary",
            [t(2, 5, 3, width), *[t(5, 1, width, dtype="float32", grad=False)] * 2],
            rotary,
            attrs={"wide": 1},
            dtypes=("bfloat16", "float16"),
            name="float32-result",
            resize=False,
        )
        for width in (6, 48)
    ),
    Case(
        "ortmodule::Rotary",
        [t(2, 5, 6), t(5, 6, grad=False), t(5, 6, grad=False)],
        lambda x, c, s: rotary(x, c, s, inverse=True),
        attrs={"inverse": 1},
        name="inverse",
        resize=False,
    ),
]
