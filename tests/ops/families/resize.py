"""Lists cases of resampling: Resize, Upsample, GridSample."""

import torch
import torch.nn.functional as F

from tests.ops.cases import FLOAT, Case, t, value

EMPTY = value([], "float32")
FLOATS_AND_BYTES = FLOAT + ("uint8",)


def resize(x, mode="nearest", size=None, scale=None, align=None, transform=None, opset=18, **kwargs):
    """As F.interpolate does it, written as the exporter does."""
    torch_mode = {"nearest": "nearest", "cubic": "bicubic"}.get(mode) or {3: "linear", 4: "bilinear", 5: "trilinear"}[
        len(x)
    ]
    transform = transform or ("asymmetric" if mode == "nearest" else "align_corners" if align else "half_pixel")
    attrs = {"mode": mode, "coordinate_transformation_mode": transform, "nearest_mode": "floor"}
    attrs |= {"cubic_coeff_a": -0.75} if mode == "cubic" else {}

    def ref(x, *_):
        return F.interpolate(x, size=size, scale_factor=scale, mode=torch_mode, align_corners=align)

    if size:
        inputs = [t(*x), None, None, value([*x[:2], *size], "int64")]
    else:
        inputs = [t(*x), None, value([1.0, 1.0, *scale], "float32")]
    return Case("Resize", inputs, ref, attrs, opset=opset, const=3 if size else 2, resize=False, **kwargs)


def along(x, axis, index, weight):
    """The sum over k of weight[i][k] * x[index[i][k]] along an axis."""
    picked = x.movedim(axis, -1)[..., torch.tensor(index)]
    return (picked * torch.tensor(weight, dtype=x.dtype)).sum(-1).movedim(-1, axis)


def pick(attrs, index, x=(1, 1, 5), size=None, scale=None, opset=18, **kwargs):
    """Nearest neighbours along the last axis: `index` is the answer."""
    inputs = [t(*x), None, None, value([*x[:-1], size], "int64")] if size else None
    inputs = inputs or [t(*x), None, value([1.0] * (len(x) - 1) + [scale], "float32")]
    return Case(
        "Resize",
        inputs,
        lambda x, *_: x[..., torch.tensor(index)],
        {"mode": "nearest"} | attrs,
        opset=opset,
        const=3 if size else 2,
        resize=False,
        **kwargs,
    )


def antialiased(x, mode, size, **kwargs):
    torch_mode = {"linear": "bilinear", "cubic": "bicubic"}[mode]
    attrs = {"mode": mode, "coordinate_transformation_mode": "half_pixel", "antialias": 1, "cubic_coeff_a": -0.5}
    return Case(
        "Resize",
        [t(*x), None, None, value([*x[:2], *size], "int64")],
        lambda x, *_: F.interpolate(x, size=size, mode=torch_mode, antialias=True),
        attrs,
        const=3,
        resize=False,
        name="antialias",
        **kwargs,
    )


def grid_sample(x, points, mode="bilinear", padding="zeros", align=False, opset=16, spread=1.2, **kwargs):
    names = {"bilinear": "linear", "bicubic": "cubic"} if opset >= 20 else {}
    attrs = {"mode": names.get(mode, mode), "padding_mode": padding, "align_corners": int(align)}

    def ref(x, grid):
        return F.grid_sample(x, grid, mode, padding, align)

    grid = t(x[0], *points, len(points), low=-spread, high=spread)
    # A coordinate rounded to 16 bits may pick another neighbour, and slopes differ from side to side.
    dtypes = ("float32", "float64") if mode == "nearest" else FLOAT
    return Case("GridSample", [t(*x), grid], ref, attrs, opset=opset, resize=False, dtypes=dtypes, **kwargs)


CASES = [
    resize((2, 3, 5), size=(9,), dtypes=FLOATS_AND_BYTES),
    resize((2, 3, 5), scale=(2.0,)),
    resize((2, 3, 5, 4), size=(7, 9), dtypes=FLOATS_AND_BYTES),
    resize((2, 3, 5, 4), size=(3, 2)),
    resize((2, 3, 5, 4), scale=(2.0, 2.0)),
    resize((2, 3, 5, 7), scale=(1.5, 0.6)),
    resize((2, 3, 5, 4), size=(5, 4)),
    resize((2, 3, 5, 4), size=(5, 8)),
    resize((1, 2, 3, 4, 5), size=(6, 5, 3)),
    resize((2, 3, 5, 4), scale=(2.0, 2.0), opset=13),
    resize((0, 3, 5, 4), scale=(2.0, 2.0)),
    resize((2, 3, 5), "linear", size=(9,), align=False),
    resize((2, 3, 5), "linear", size=(9,), align=True),
    resize((2, 3, 5), "linear", size=(1,), align=True),
    resize((2, 3, 5, 4), "linear", size=(7, 9), align=False),
    resize((2, 3, 5, 4), "linear", size=(7, 9), align=True),
    resize((2, 3, 8, 9), "linear", size=(3, 4), align=False),
    resize((2, 3, 8, 9), "linear", size=(3, 4), align=True),
    resize((2, 3, 5, 4), "linear", scale=(2.0, 2.0), align=False),
    resize((2, 3, 5, 7), "linear", scale=(1.7, 0.6), align=False),
    resize((2, 3, 5, 4), "linear", scale=(2.0, 2.0), align=False, opset=13),
    resize((1, 2, 3, 4, 5), "linear", size=(6, 5, 3), align=False),
    resize((1, 2, 3, 4, 5), "linear", size=(6, 5, 3), align=True),
    resize((2, 3, 33, 40), "linear", size=(66, 80), align=False),
    resize((2, 3, 5, 4), "cubic", size=(7, 9), align=False),
    resize((2, 3, 5, 4), "cubic", size=(7, 9), align=True),
    resize((2, 3, 8, 9), "cubic", size=(3, 4), align=False),
    resize((2, 3, 5, 4), "cubic", scale=(2.0, 2.5), align=False),
    antialiased((2, 3, 9, 10), "linear", (4, 3)),
    antialiased((2, 3, 9, 10), "linear", (14, 13)),
    antialiased((2, 3, 9, 10), "cubic", (4, 3)),
    pick({}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], scale=2.0),
    pick({"nearest_mode": "ceil"}, [0, 1, 1, 2, 2, 3, 3, 4, 4, 4], scale=2.0),
    pick({"coordinate_transformation_mode": "asymmetric"}, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], scale=2.0),
    pick(
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "round_prefer_ceil"},
        [0, 1, 1, 2, 2, 3, 3, 4, 4, 4],
        scale=2.0,
    ),
    pick({"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}, [0, 2, 4], size=3),
    pick({"coordinate_transformation_mode": "align_corners", "nearest_mode": "floor"}, [0, 2, 4], size=3),
    pick({"coordinate_transformation_mode": "pytorch_half_pixel", "nearest_mode": "floor"}, [0], size=1),
    pick({"coordinate_transformation_mode": "half_pixel_symmetric"}, [0, 1, 3, 4], scale=0.9, opset=19),
    Case(
        "Resize",
        [t(2, 3, 4, 6), None, None, value([8], "int64")],
        lambda x, *_: F.interpolate(x, size=(8, 6), mode="bilinear"),
        {"mode": "linear", "axes": [-2]},
        const=3,
        resize=False,
        name="axes",
    ),
    Case(
        "Resize",
        [t(2, 3, 4, 6), None, None, value([8, 9], "int64")],
        lambda x, *_: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
        {"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_larger"},
        const=3,
        resize=False,
        name="not_larger",
    ),
    Case(
        "Resize",
        [t(2, 3, 4, 6), None, None, value([8, 9], "int64")],
        lambda x, *_: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        {"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": "not_smaller"},
        const=3,
        resize=False,
        name="not_smaller",
    ),
    Case(
        "Resize",
        [t(1, 1, 3), None, value([1.0, 1.0, 2.0], "float32")],
        lambda x, *_: along(
            x,
            -1,
            [[0, 1], [0, 1], [0, 1], [1, 2], [1, 2], [1, 2]],
            [[1, 0], [0.75, 0.25], [0.25, 0.75], [0.75, 0.25], [0.25, 0.75], [0, 1]],
        ),
        {"mode": "linear", "exclude_outside": 1},
        const=2,
        resize=False,
        name="exclude_outside",
    ),
    Case(
        "Resize",
        [t(1, 2, 3, 4), value([1.0, 1.0, 2.0, 2.0], "float32")],
        lambda x, _: F.interpolate(x, scale_factor=2.0),
        {"mode": "nearest"},
        opset=10,
        const=1,
        resize=False,
    ),
    Case(
        "Upsample",
        [t(1, 2, 3, 4), value([1.0, 1.0, 2.0, 3.0], "float32")],
        lambda x, _: F.interpolate(x, scale_factor=(2.0, 3.0)),
        {"mode": "nearest"},
        opset=9,
        const=1,
        resize=False,
    ),
    *[
        grid_sample((2, 3, 6, 5), (4, 7), mode, padding, align)
        for mode in ("bilinear", "nearest", "bicubic")
        for padding in ("zeros", "border", "reflection")
        for align in (False, True)
    ],
    *[
        grid_sample((2, 3, 4, 6, 5), (2, 4, 7), mode, padding, align, opset=20)
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border", "reflection")
        for align in (False, True)
    ],
    grid_sample((2, 3, 6, 5), (4, 7), "bicubic", opset=20),
    grid_sample((2, 3, 6, 5), (9, 30), spread=3.0),
    grid_sample((0, 3, 6, 5), (4, 7)),
]
