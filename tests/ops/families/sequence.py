"""Lists of tensors: made, changed and read within one model."""

import torch

from tests.ops.cases import Case, t, value

I64 = "int64"


def case(op, inputs, nodes, ref, **kwargs):
    """Every operand but the first ones, which t() made, is written into the model."""
    const = [i for i, x in enumerate(inputs) if x.fixed is not None]
    return Case(op, inputs, ref, const=const, nodes=nodes, fd=False, resize=False, **kwargs)


def number(x):
    return value(x, I64)


CASES = [
    case(
        "SequenceConstruct",
        [t(2, 3), t(4, 3)],
        [("SequenceConstruct", "x0 x1", "s"), ("ConcatFromSequence", "s", "y0", {"axis": 0})],
        lambda x, y: torch.cat([x, y]),
    ),
    case(
        "ConcatFromSequence",
        [t(2, 3), t(2, 3)],
        [("SequenceConstruct", "x0 x1", "s"), ("ConcatFromSequence", "s", "y0", {"axis": -1, "new_axis": 1})],
        lambda x, y: torch.stack([x, y], -1),
    ),
    case(
        "SequenceAt",
        [t(2, 3), t(4, 3), number(-1)],
        [("SequenceConstruct", "x0 x1", "s"), ("SequenceAt", "s x2", "y0")],
        lambda x, y, i: y * 1,
    ),
    case(
        "SequenceInsert",
        [t(1, 3), t(2, 3), t(3, 3), number(-1)],
        [
            ("SequenceEmpty", "", "none"),
            ("SequenceInsert", "none x0", "one"),
            ("SequenceInsert", "one x1", "two"),
            ("SequenceInsert", "two x2 x3", "three"),
            ("ConcatFromSequence", "three", "y0", {"axis": 0}),
        ],
        lambda x, y, z, i: torch.cat([x, z, y]),
        name="built",
    ),
    case(
        "SequenceEmpty",
        [t(2, 3)],
        [("SequenceEmpty", "", "s"), ("SequenceInsert", "s x0", "t"), ("SequenceLength", "t", "y0")],
        lambda x: torch.tensor(1),
        grad=False,
    ),
    case(
        "SequenceLength",
        [t(2, 3), t(4, 3)],
        [("SequenceConstruct", "x0 x1", "s"), ("SequenceLength", "s", "y0")],
        lambda x, y: torch.tensor(2),
        grad=False,
    ),
    case(
        "SplitToSequence",
        [t(2, 7), number([3, 4]), number(1)],
        [("SplitToSequence", "x0 x1", "s", {"axis": 1}), ("SequenceAt", "s x2", "y0")],
        lambda x, n, i: x.split([3, 4], 1)[1],
        name="sizes",
    ),
    case(
        "SplitToSequence",
        [t(7, 2), number(3), number(2)],
        [("SplitToSequence", "x0 x1", "s"), ("SequenceAt", "s x2", "y0")],
        lambda x, n, i: x.split(3)[2],
        name="size",
    ),
    case(
        "SplitToSequence",
        [t(3, 2)],
        [("SplitToSequence", "x0", "s", {"axis": 1, "keepdims": 0}),
         ("ConcatFromSequence", "s", "y0", {"axis": 0})],
        lambda x: torch.cat(x.unbind(1)),
        name="items",
    ),
    case(
        "SplitToSequence",
        [t(3, 2), number(0)],
        [("SplitToSequence", "x0", "s", {"axis": 0}), ("SequenceAt", "s x1", "y0")],
        lambda x, i: x[:1],
        name="kept",
    ),
]  # fmt: skip
