"""Lists cases of operators whose result is as large as the data says, with and without a prologue."""

import torch

from tests.ops.cases import ALL, FLOAT, NUMBER, Case, t, value


def unique(data, axis=None, sorted_=True, **kwargs):
    def ref(x):
        y, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
        inverse = inverse.reshape(-1)
        first = torch.stack([(inverse == i).nonzero()[0, 0] for i in range(len(counts))])
        if not sorted_:
            order = first.argsort()
            y, first, counts = y.index_select(axis or 0, order), first[order], counts[order]
            inverse = order.argsort()[inverse]
        return y, first, inverse, counts

    attrs = {"sorted": int(sorted_)} | ({} if axis is None else {"axis": axis})
    return Case("Unique", [value(data)], ref, attrs=attrs, const=0, name=f"{axis}{sorted_}", grad=False,
                **{"outputs": 4, "dtypes": NUMBER, **kwargs})  # fmt: skip


CASES = [
    Case("NonZero", [value([[1, 0, 2], [0, 0, 3]])], lambda x: x.nonzero().T, const=0, dtypes=ALL),
    Case("NonZero", [value([0, 0])], lambda x: x.nonzero().T, const=0, dtypes=ALL, name="none"),
    Case("NonZero", [value([[[1.0, float("nan")]]])], lambda x: x.nonzero().T, const=0, name="nan"),
    Case("NonZero", [value([[1, 0, 2], [0, 0, 3]])], lambda x: x.nonzero().T, dtypes=ALL, name="data"),
    Case("NonZero", [value([0, 0])], lambda x: x.nonzero().T, dtypes=ALL, name="none in data"),
    Case("Compress", [t(3, 4), value([True, False, True], "bool")], lambda x, c: x[c], attrs={"axis": 0}, dtypes=ALL,
         name="data", fd=False, resize=False),
    Case("Compress", [t(3, 4), value([True, False, True], "bool")], lambda x, c: x[c], const=1, attrs={"axis": 0},
         dtypes=ALL, fd=False, resize=False),
    Case("Compress", [t(3, 4), value([False, True], "bool")], lambda x, c: x[:, 1:2], const=1, attrs={"axis": -1},
         name="short", resize=False),
    Case("Compress", [t(3, 2), value([False, True, True, False, True], "bool")], lambda x, c: x.reshape(-1)[:5][c],
         const=1, name="flat", resize=False),
    unique([3, 1, 2, 3, 1, 7, 3]),
    unique([[3, 1], [2, 3], [1, 7]]),
    unique([3, 1, 2, 3, 1, 7, 3], sorted_=False),
    unique([[3, 1], [2, 3], [3, 1], [1, 7]], 0),
    unique([[3, 1], [2, 3], [3, 1], [1, 7]], 0, False),
    unique([[3, 1, 3], [2, 5, 2]], 1, dtypes=FLOAT),
    unique([5]),
    unique([3, 1, 2, 3], outputs=1, dtypes=("int64", "bool")),
]  # fmt: skip
