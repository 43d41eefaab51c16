"""Lists cases of TopK."""

from tests.ops.cases import FLOAT, NUMBER, Case, t, value

I64 = "int64"


def top(shape, k, axis=-1, largest=True, **kwargs):
    def ref(x, k):
        # A stable sort: of equal elements the first comes first.
        values, indices = x.sort(dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, k.item()), indices.narrow(axis, 0, k.item())

    return Case(
        "TopK", [t(*shape) if isinstance(shape, tuple) else shape, value([k], I64)], ref, const=1, outputs=2,
        attrs={"axis": axis, "largest": int(largest)}, name=f"{k}{'largest' if largest else 'smallest'}",
        **{"fd": False, **kwargs},
    )  # fmt: skip


CASES = [
    top((3, 9), 4, dtypes=NUMBER, large=[t(256, 4096), value([16], I64)]),
    top((3, 9), 4, largest=False, dtypes=NUMBER),
    top((5, 3, 2), 2, 0),
    top((4, 6, 5), 6, 1, dtypes=NUMBER),
    top((4, 6, 5), 6, -2, largest=False),
    top((3, 9), 1),
    top((3, 9), 0, dtypes=FLOAT),
    top((0, 9), 3),
    top((3, 0), 0, resize=False),
    top((300,), 300),
    top((300,), 7, largest=False),
    top((40, 200), 50, dtypes=FLOAT),
    top(t(3, 21, special=True), 21),
    top(t(3, 21, special=True), 21, largest=False),
    top(t(3, 21, special=True), 5),
    top((3, 9), 4, opset=11, dtypes=FLOAT),
    Case("TopK", [t(3, 9), value([4], I64)], lambda x, k: x.topk(k.item()).values, const=1, name="values", fd=False,
         nodes=[("TopK", "x0 x1", "y0 indices")], resize=False),
    Case("TopK", [t(3, 9), value([4], I64)], lambda x, k: x.topk(k.item()).indices, const=1, name="indices", grad=False,
         nodes=[("TopK", "x0 x1", "values y0")], resize=False),
]  # fmt: skip
