"""Lists cases of tensors made from attributes and shapes."""

import numpy as np
import torch

from tests.ops.cases import ALL, BOOL, FLOAT, NUMBER, Case, t, value

I64 = "int64"


def typed(number):
    return lambda dtype: torch.tensor([number], dtype=getattr(torch, dtype))


def filled(to, number):
    def ref(s):
        return torch.full(tuple(s.tolist()), number, dtype=torch.float32)

    return Case("ConstantOfShape", [value(to, I64)], ref, const=0, attrs={"value": torch.tensor([float(number)])},
                dtypes="float32", name=f"{to}")  # fmt: skip


def filled_as(dtype, number):
    tensor = torch.tensor([number], dtype=getattr(torch, dtype))
    return Case("ConstantOfShape", [value([2, 3], I64)], lambda s: tensor.expand(2, 3).clone(), const=0,
                attrs={"value": tensor}, dtypes="float32", name=dtype)  # fmt: skip


def count(*args, name, dtypes):
    return Case("Range", [value(a) for a in args], lambda *x: torch.arange(*(v.item() for v in x), dtype=x[0].dtype),
                const=(0, 1, 2), dtypes=dtypes, name=name)  # fmt: skip


def eye(shape, k=0, dtype=None, **kwargs):
    def ref(x):
        return torch.from_numpy(np.eye(x.shape[0], x.shape[1], k, dtype=np.float64)).to(dtype or x.dtype)

    onnx_type = {torch.float32: 1, torch.bool: 9, torch.int64: 7}
    return Case("EyeLike", [t(*shape)], ref, attrs={"k": k} | ({"dtype": onnx_type[dtype]} if dtype else {}),
                name=f"{k}{dtype}", **{"dtypes": ALL, "grad": False, **kwargs})  # fmt: skip


CASES = [
    Case("Constant", [], lambda: torch.tensor([1.5, 2.0]), attrs={"value": torch.tensor([1.5, 2.0])}, dtypes="float32"),
    Case("Constant", [], lambda: torch.tensor(7), attrs={"value_int": 7}, dtypes=I64, name="int"),
    Case("Constant", [], lambda: torch.tensor(2.5), attrs={"value_float": 2.5}, dtypes="float32", name="float"),
    Case("Constant", [], lambda: torch.tensor([7, -1]), attrs={"value_ints": [7, -1]}, dtypes=I64, name="ints"),
    Case("Constant", [], lambda: torch.tensor([2.5, 1]), attrs={"value_floats": [2.5, 1.0]}, dtypes="float32",
         name="floats"),
    filled([2, 3], 1.5),
    filled([], -1),
    filled([0, 4], 1),
    filled([600, 700], 2),
    *[filled_as(dtype, 3) for dtype in NUMBER],
    filled_as("bool", True),
    Case("ConstantOfShape", [value([3], I64)], lambda s: torch.zeros(3), const=0, dtypes="float32", name="default"),
    Case("Shape", [t(2, 0, 4)], lambda x: torch.tensor(x.shape), dtypes=ALL, grad=False),
    Case("Shape", [t()], lambda x: torch.tensor(x.shape, dtype=torch.int64), grad=False),
    Case("Shape", [t(2, 3, 4, 5)], lambda x: torch.tensor(x.shape[1:-1]), attrs={"start": 1, "end": -1}, grad=False),
    Case("Shape", [t(2, 3, 4)], lambda x: torch.tensor(x.shape[-2:]), attrs={"start": -2}, grad=False, name="last"),
    Case("Shape", [t(2, 3)], lambda x: torch.tensor([], dtype=torch.int64), attrs={"start": 5, "end": -9}, grad=False,
         name="none"),
    Case("Size", [t(2, 3, 4)], lambda x: torch.tensor(x.numel()), dtypes=ALL, grad=False),
    Case("Size", [t()], lambda x: torch.tensor(1), grad=False, name="scalar"),
    count(0, 5, 1, name="up", dtypes=("float32", "float64", "int16", "int32", I64)),
    count(7, -2, -3, name="down", dtypes=("float32", "float64", "int16", "int32", I64)),
    *[
        Case("Range", [value(5), value(end), value(2)], lambda *x: torch.zeros(0, dtype=x[0].dtype), const=(0, 1, 2),
             name=f"none{end}", dtypes=("float32", "int32", I64))
        for end in (5, 2)
    ],
    count(0.0, 1.0, 0.3, name="fraction", dtypes=("float32", "float64")),
    count(0, 200000, 1, name="long", dtypes=("float32", I64)),
    eye((3, 3)),
    eye((3, 5), 1),
    eye((5, 3), -2),
    eye((3, 4), 9),
    eye((0, 4)),
    eye((4, 4), 0, torch.bool, dtypes=("float32", I64)),
    eye((2, 3), 1, torch.int64, dtypes=FLOAT + BOOL),
]  # fmt: skip
