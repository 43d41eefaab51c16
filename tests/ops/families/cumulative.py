"""Lists cases of running sums."""

import torch

from tests.ops.cases import ALL, FLOAT, Case, t, value


def cumsum(shape, axis, exclusive=0, reverse=0, **kwargs):
    def ref(x, _):
        y = x.flip(axis) if reverse and x.dim() else x
        y = y.cumsum(axis, dtype=torch.int32 if x.dtype == torch.int32 else None)
        if exclusive:
            y = y - (x.flip(axis) if reverse and x.dim() else x).to(y.dtype)
        return y.flip(axis) if reverse and x.dim() else y

    attrs = {"exclusive": exclusive, "reverse": reverse}
    name = f"{axis}{'-exclusive' * exclusive}{'-reverse' * reverse}"
    options = {"dtypes": ALL, "opset": 14, "name": name, **kwargs}
    return Case("CumSum", [t(*shape), value(axis, "int32")], ref, attrs=attrs, const=1, **options)


CASES = [
    cumsum((7,), 0),
    *(cumsum((2, 3, 5), axis, exclusive, reverse) for axis in (0, 1, -1) for exclusive in (0, 1) for reverse in (0, 1)),
    cumsum((3, 5, 300), 1, dtypes=FLOAT),
    cumsum((2, 4000), 1, dtypes=("float32", "float64"), fd=False),
    cumsum((), 0, dtypes=FLOAT),
    cumsum((0, 3), 1, dtypes=FLOAT),
    cumsum((5, 4), 0, opset=11, dtypes=("float32", "int64")),
]
