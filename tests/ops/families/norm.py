"""Lists cases of normalisation over the last axes and over groups of channels."""

import math

import torch
import torch.nn.functional as F

from tests.ops.cases import FLOAT, Case, ints, t, value

FEW = ("float32", "float64", "bfloat16")


def spread(w, shape):
    return None if w is None else w.expand(shape)


def layer(shape, axis=-1, bias=True, scale_shape=None, outputs=1, epsilon=1e-3, **kwargs):
    normalised = shape[axis:] if axis < 0 else shape[axis:]
    scale_shape = scale_shape or normalised

    def ref(x, w, b=None):
        over = x.shape[axis:]
        y = F.layer_norm(x, over, spread(w, over), spread(b, over), epsilon)
        if outputs == 1:
            return y
        dims = [i - len(over) for i in range(len(over))]
        return y, x.mean(dims, keepdim=True), (x.var(dims, correction=0, keepdim=True) + epsilon).rsqrt()

    inputs = [t(*shape), t(*scale_shape)] + ([t(*scale_shape)] if bias else [])
    options = {"dtypes": FEW, "opset": 17, "outputs": outputs, "grad": outputs == 1, "name": f"axis{axis}", **kwargs}
    return Case("LayerNormalization", inputs, ref, attrs={"axis": axis, "epsilon": epsilon}, **options)


def rms(shape, axis=-1, scale=None, epsilon=1e-3, **kwargs):
    def ref(x, w):
        wide = torch.promote_types(torch.promote_types(x.dtype, w.dtype), torch.float32)
        over = tuple(range(axis, 0)) if axis < 0 else tuple(range(axis, x.dim()))
        z = x.to(wide)
        return (z * (z.square().mean(over, keepdim=True) + epsilon).rsqrt() * w.to(wide)).to(w.dtype)

    inputs = [t(*shape), scale or t(*shape[axis:])]
    attrs = {"axis": axis, "epsilon": epsilon}
    options = {"dtypes": FEW, "opset": 23, "name": f"axis{axis}", **kwargs}
    return Case("RMSNormalization", inputs, ref, attrs=attrs, **options)


def instance(shape, epsilon=1e-3, **kwargs):
    def ref(x, w, b):
        return F.instance_norm(x, None, None, w, b, True, 0.1, epsilon)

    inputs = [t(*shape), t(shape[1]), t(shape[1])]
    options = {"dtypes": FEW, "opset": 17, **kwargs}
    return Case("InstanceNormalization", inputs, ref, attrs={"epsilon": epsilon}, **options)


def group(shape, groups, epsilon=1e-3, **kwargs):
    def ref(x, w, b):
        return F.group_norm(x, groups, w, b, epsilon)

    inputs = [t(*shape), t(shape[1]), t(shape[1])]
    attrs = {"epsilon": epsilon, "num_groups": groups}
    options = {"dtypes": FEW, "opset": 21, "name": f"groups{groups}", "resize": False, **kwargs}
    return Case("GroupNormalization", inputs, ref, attrs=attrs, **options)


def lp(p, axis):
    def ref(x):
        norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
        return x / torch.where(norm == 0, 1, norm)

    return lambda x, **kwargs: Case(
        "LpNormalization", [x], ref, attrs={"p": p, "axis": axis}, dtypes=FEW, name=f"p{p}-axis{axis}", **kwargs
    )


def mean_variance(shape, axes=None):
    def ref(x):
        over = [0, 2, 3] if axes is None else axes
        centred = x - x.mean(over, keepdim=True)
        return centred / (centred.square().mean(over, keepdim=True).sqrt() + 1e-9)

    attrs = {} if axes is None else {"axes": axes}
    return Case("MeanVarianceNormalization", [t(*shape)], ref, attrs=attrs, opset=13, dtypes=FEW, resize=False)


ADD = ("Add", "x0 x1", "s")
DROPPED = [("Dropout", "x0 x4 x5", "d"), ("Add", "d x1", "s")]
TO = {"float32": 1, "float16": 10, "bfloat16": 16}


def fused(name, x, residual, nodes=(ADD,), axis=-1, outputs="y s", centred=True, narrow=None, more=(), **kwargs):
    """What passes/norm_residual.c makes of a norm and its neighbours: `outputs` are the norm's result, that in 16 bits,
    the sum that it is of."""
    op, opset = ("LayerNormalization", 17) if centred else ("RMSNormalization", 23)
    made = {name: f"y{i}" for i, name in enumerate(outputs.split())}
    operands = "s x2 x3" if centred else "s x2"
    rows = [*nodes, (op, operands, "y", {"axis": axis, "epsilon": 1e-3})]
    if narrow:
        rows.append(("Cast", "y", "narrow", {"to": TO[narrow]}))
    rows = [
        (op, *(" ".join(made.get(v, v) for v in values.split()) for values in row[:2]), *row[2:]) for op, *row in rows
    ]

    def ref(a, b, w, bias=None, *_):
        s = sum_of(a, b, nodes)
        over = s.shape[axis:]
        if centred:
            y = F.layer_norm(s, over, w, bias, 1e-3)
        else:
            y = s * (s.square().mean(tuple(range(-len(over), 0)), keepdim=True) + 1e-3).rsqrt() * w
        found = {"y": y, "s": s, "narrow": y.to(getattr(torch, narrow or "float32"))}
        return tuple(found[name] for name in outputs.split())

    scale = [t(*residual.shape[axis:], dtype=residual.dtype)] * (2 if centred else 1)
    options = {"dtypes": FLOAT, "opset": opset, "outputs": len(made), "name": f"{name}-axis{axis}", **kwargs}
    kind = "FusedNormRandom" if more else "FusedNorm"
    return Case(f"ortmodule::{kind}", [x, residual, *scale, *more], ref, nodes=tuple(rows), **options)


def embedded(words, index, places, others=None, **kwargs):
    """What passes/embedding_norm.c makes of a norm of rows of tables and of others that lie in order."""
    width = words.shape[-1]
    more = [("Gather", "x5 x6", "kinds"), ("Add", "some kinds", "sum")] if others else []
    rows = [
        ("Gather", "x0 x1", "words"),
        ("Add", "words x2", "some" if others else "sum"),
        *more,
        ("LayerNormalization", "sum x3 x4", "y0", {"axis": -1, "epsilon": 1e-3}),
    ]

    def ref(table, i, places, w, b, kinds=None, j=None):
        s = table[i.long()] + places
        return F.layer_norm(s if kinds is None else s + kinds[j.long()], (width,), w, b, 1e-3)

    tensors = [words, index, places, t(width), t(width), *(others or ())]
    options = {"dtypes": FLOAT, "opset": 17, "resize": False, **kwargs}
    return Case("ortmodule::EmbeddingNorm", tensors, ref, nodes=tuple(rows), **options)


def embedding_cases():
    return [
        embedded(t(9, 6), ints(2, 4, high=9), t(1, 4, 6), name="positions"),
        embedded(t(9, 6), ints(2, 4, high=9), t(4, 6), (t(2, 6), ints(2, 4, high=2)), name="types"),
        embedded(t(9, 1), ints(3, low=-9, high=9), t(3, 1), name="narrow", vanishing=(0, 2, 3)),
        embedded(t(5, 1030), ints(7, high=5, dtype="int32"), t(7, 1030), (t(3, 1030), ints(7, high=3)), name="wide",
                 dtypes=("float32", "float64"), fd=False),
        embedded(t(9, 6), ints(0, 4, high=9), t(1, 4, 6), name="empty"),
        embedded(t(9, 6, special=True), ints(2, 4, high=9), t(4, 6), name="special", grad=False),
    ]  # fmt: skip


def sum_of(x, residual, nodes):
    """At a rate of 1 dropout leaves nothing of x; `s` is x itself where nothing is added."""
    if not nodes:
        return x
    return (x * 0 if nodes[0][0] == "Dropout" else x).to(residual.dtype) + residual


def residual_cases():
    ones = [value(1.0, "float32"), value(True, "bool")]
    wide = {"dtypes": ("bfloat16", "float16"), "fd": False}
    widened = [("Cast", "x0", "c", {"to": 1}), ("Add", "x1 c", "s")]
    dropped = [*DROPPED[:1], ("Cast", "d", "c", {"to": 1}), ("Add", "c x1", "s")]
    return [
        fused("sum", t(6, 5), t(6, 5), large=[t(1024, 768), t(1024, 768), t(768), t(768)]),
        fused("sum", t(6, 5), t(6, 5), centred=False),
        fused("sum", t(2, 3, 5), t(2, 3, 5), axis=-2),
        fused("sum", t(4, 1), t(4, 1), vanishing=(2,)),
        fused("sum", t(300, 70), t(300, 70), dtypes=("float32", "float64"), fd=False),
        fused("sum", t(5, 3000), t(5, 3000), centred=False, fd=False),
        fused("empty", t(0, 5), t(0, 5), resize=False),
        fused("no-sum", t(6, 5), t(6, 5), outputs="y"),
        fused("no-sum", t(3, 70), t(3, 70), outputs="y", centred=False),
        fused("special", t(7, 14, special=True), t(7, 14), grad=False),
        fused("widened", t(6, 5), t(6, 5, dtype="float32"), nodes=widened, **wide),
        fused("widened", t(3, 1030), t(3, 1030, dtype="float32"), nodes=widened, centred=False, **wide),
        *(fused(f"narrow-{to}", t(6, 5), t(6, 5), outputs=outputs, narrow=to, centred=centred, dtypes="float32")
          for to in ("bfloat16", "float16") for centred in (True, False)
          for outputs in ("narrow", "y narrow", "narrow s")),
        fused("dropout", t(3, 900), t(3, 900), nodes=DROPPED, more=ones, const=(4, 5), fd=False),
        fused("dropout", t(4, 7), t(4, 7), nodes=DROPPED, more=ones, const=(4, 5), outputs="y", fd=False),
        fused("dropout-widened", t(3, 70), t(3, 70, dtype="float32"), nodes=dropped, more=ones, const=(4, 5), **wide),
    ]  # fmt: skip


def strange(where, width=70):
    """NaN and infinities in one of x, scale and bias; among x rows with the largest numbers, and of but one number."""
    numbers = [[[math.sin(i + row) for i in range(width)] for row in range(6)], [1.0] * width, [0.5] * width]
    if where == 0:
        numbers[0][1][:2], numbers[0][2] = [3e38, -3e38], [7.0] * width
        numbers[0][3][40], numbers[0][4][-1], numbers[0][5][33] = math.nan, math.inf, -math.inf
    else:
        numbers[where][3], numbers[where][40], numbers[where][-1] = math.nan, math.inf, -math.inf

    def ref(x, w, b):
        return F.layer_norm(x, w.shape, w, b, 1e-3)

    options = {"grad": False, "resize": False, "dtypes": FEW, "opset": 17, "name": f"strange{where}"}
    attrs = {"axis": -1, "epsilon": 1e-3}
    return Case("LayerNormalization", [value(n) for n in numbers], ref, attrs=attrs, **options)


CASES = [
    *(strange(where) for where in range(3)),
    *residual_cases(),
    *embedding_cases(),
    layer((6, 5), dtypes=FLOAT, large=[t(1024, 768), t(768), t(768)]),
    layer((2, 3, 5)),
    layer((2, 3, 5), bias=False),
    layer((2, 3, 5), -2),
    layer((2, 3, 5), 1, bias=False),
    layer((2, 3, 5), 0),
    layer((2, 3, 5), -2, scale_shape=(5,), name="repeated"),
    layer((4, 3, 5), -2, scale_shape=(3, 1), name="repeated"),
    layer((5,)),
    layer((4, 1), vanishing=(0, 1)),
    layer((0, 5), resize=False),
    layer((300, 70), fd=False),
    layer((5, 3000), fd=False),
    layer((3, 4, 5), outputs=3, dtypes=("float32", "float64")),
    Case("LayerNormalization", [t(3, 5), t(5, dtype="float32"), t(5, dtype="float32")],
         lambda x, w, b: F.layer_norm(x.float(), x.shape[-1:], w, b, 1e-3).to(x.dtype),
         attrs={"epsilon": 1e-3}, opset=17, dtypes=("bfloat16", "float16"), name="wide-scale"),
    layer((7, 14), name="special", grad=False, epsilon=1e-5),
    rms((6, 5), dtypes=FLOAT, large=[t(1024, 768), t(768)]),
    rms((2, 3, 5), -2),
    rms((2, 3, 5), 0),
    rms((300, 70), fd=False),
    rms((4, 1)),
    rms((3, 5), scale=t(5, dtype="float32"), dtypes=("bfloat16", "float32", "float64"), fd=False, name="other-scale"),
    rms((3, 5), scale=t(5, dtype="bfloat16"), dtypes=("float32",), name="narrow-scale"),
    instance((2, 3, 5), dtypes=FLOAT),
    instance((2, 3, 4, 5)),
    instance((2, 3, 1500), fd=False),
    *(group((2, 6, 5), groups) for groups in (1, 2, 6)),
    group((2, 6, 3, 4), 3),
    group((5, 8), 2, dtypes=FLOAT),
    group((3, 64, 30, 2), 8, fd=False),
    *(lp(p, axis)(t(3, 4, 5)) for p in (1, 2) for axis in (-1, 0)),
    lp(2, 1)(value([[0.0, 0.0], [3.0, -4.0]]), fd=False, resize=False, grad=False),
    mean_variance((2, 3, 4, 5)),
    mean_variance((4, 7), [1]),
]  # fmt: skip
