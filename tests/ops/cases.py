"""Lists the cases of operators, which drive forward, gradient and timing tests and docs/ops.md.

A family module (tests/ops/families/<family>.py) reads

    from tests.ops.cases import FLOAT, Case, ints, t

    CASES = [
        Case("Softmax", [t(2, 3, 5)], lambda x: x.softmax(-1)),
        Case("Gather", [t(5, 4), ints(2, 3, low=-5, high=5)], lambda x, i: x[i], attrs={"axis": 0}),
    ]

Where the case's dtype is an integer type or bool, t() makes integers or booleans.
"""

import importlib
import math
import pkgutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.ops import families

FLOAT = ("float32", "float64", "bfloat16", "float16")
INT = ("int64", "int32", "int16", "int8", "uint8")
BOOL = ("bool",)
NUMBER = FLOAT + INT
ALL = NUMBER + BOOL


# --- operands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """How one operand is made. `dtype` None is the case's; `low` and `high` None is a normal distribution."""

    shape: tuple
    dtype: str | None = None
    low: float | None = None
    high: float | None = None
    special: bool = False
    fixed: object = None
    grad: bool = True

    def make(self, case_dtype, generator):
        dtype = getattr(torch, self.dtype or case_dtype)
        if self.fixed is not None:
            data = torch.tensor(self.fixed)
            return (torch.tensor(self.fixed, dtype=torch.float64) if data.is_floating_point() else data).to(dtype)
        if dtype == torch.bool:
            return torch.randint(0, 2, self.shape, generator=generator).bool()
        if dtype.is_floating_point:
            return self._floats(dtype, generator)
        return self._integers(dtype, generator)

    def _integers(self, dtype, generator):
        low = -5 if self.low is None else math.ceil(self.low)
        high = 6 if self.high is None else math.floor(self.high)
        if not dtype.is_signed:
            low = max(low, 0)
        return torch.randint(low, max(high, low + 1), self.shape, generator=generator).to(dtype)

    def _floats(self, dtype, generator):
        # Narrow types are rounded from float32, so that all of them see nearly the same numbers.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.low is None and self.high is None:
            x = torch.randn(self.shape, generator=generator, dtype=wide)
        else:
            low = 0.0 if self.low is None else self.low
            high = 1.0 if self.high is None else self.high
            x = torch.rand(self.shape, generator=generator, dtype=wide) * (high - low) + low
        if self.special:
            flat = x.view(-1)
            for i, odd in enumerate((math.nan, math.inf, -math.inf, 0.0, -0.0)):
                flat[i::7] = odd
        return x.to(dtype)


def t(*shape, low=None, high=None, special=False, dtype=None, grad=True):
    """Of the case's dtype: normal, or uniform in [low, high). `special` sprinkles NaN, infinities and zeros and
    leaves gradients untested; `grad=False` asks for no gradient of this operand."""
    return Spec(shape, dtype, low, high, special, None, grad)


def ints(*shape, low=0, high=5, dtype="int64"):
    """Integers in [low, high)."""
    return Spec(shape, dtype, low, high)


def bools(*shape):
    return Spec(shape, "bool")


def value(data, dtype=None):
    """These very numbers, in `dtype` or the case's."""
    return Spec(tuple(torch.tensor(data).shape), dtype, fixed=data)


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    op: str
    inputs: list  # of Spec; None where an optional operand is absent
    ref: Callable  # (*tensors) -> tensor or tuple: the truth, gradients by autograd
    attrs: dict = None  # tensors become tensor attributes; a callable is given the case's dtype name
    opset: int = 18
    dtypes: tuple = FLOAT
    const: tuple = ()  # operands written into the model; the others are graph inputs
    outputs: int | tuple = 1  # their number, or which are wanted: (True, False, True)
    grad: bool = True  # compare gradients with autograd and, in float64, with finite differences
    name: str = ""
    fd: bool = True  # False at ties and kinks, where a derivative is a convention
    tol: float = 1.0  # times the tolerance of the dtype
    share: float = 1.0  # times the part of it that counts for all elements: less where a few are far larger than most
    vanishing: tuple = ()  # operands whose gradient is zero by mathematics: PyTorch's is rounding
    resize: bool = True  # `ref` and attributes hold at other sizes too (random shapes)
    large: list | None = None  # operands for timing; None: the case's own, scaled up if that makes sense
    call: Callable | None = None  # what PythonOp runs
    nodes: tuple = ()  # several nodes instead of one, for what a pass makes of them (see harness.build_model)
    some_cpus: bool = False  # the pass is for CPUs with a kernel of ours: the case is one of `op` on others, too

    def __post_init__(self):
        object.__setattr__(self, "attrs", dict(self.attrs or {}))
        object.__setattr__(self, "const", (self.const,) if isinstance(self.const, int) else tuple(self.const))
        object.__setattr__(self, "dtypes", (self.dtypes,) if isinstance(self.dtypes, str) else tuple(self.dtypes))

    @property
    def label(self):
        sizes = ",".join("x".join(map(str, s.shape)) or "scalar" if s else "absent" for s in self.inputs)
        return f"{self.op}{'-' + self.name if self.name else ''}({sizes})@{self.opset}"

    @property
    def wanted(self):
        return (True,) * self.outputs if isinstance(self.outputs, int) else tuple(self.outputs)

    @property
    def has_gradient(self):
        return self.grad and not any(s and s.special for s in self.inputs)

    def tensors(self, dtype, seed=0, specs=None):
        """The operands for one dtype; the same seed makes the same numbers."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.label.encode()) + seed)
        return [s and s.make(dtype, generator) for s in (self.inputs if specs is None else specs)]

    def attributes(self, dtype):
        return {k: v(dtype) if callable(v) else v for k, v in self.attrs.items()}


#: Numbers at which functions of one operand are odd.
EDGES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 1e-3, -1e-3, 30.0, -30.0]
EDGES += [300.0, -300.0]


def curve(op, ref, **domain):
    """The cases of a smooth function of one operand, drawn from all numbers or from those `low` to `high`."""
    return [
        Case(op, [t(3, 5, **domain)], ref, large=[t(1024, 1024, **domain)]),
        Case(op, [t(2, 1031, **domain)], ref, dtypes=("float32", "float64"), name="tiles"),
        Case(op, [t(**domain)], ref, name="scalar"),
        Case(op, [t(0, 4)], ref, name="empty"),
        # At infinities the gradient may be NaN on one side only: 0 * infinity.
        Case(op, [value(EDGES)], ref, grad=False, name="edges", dtypes=("float32", "float64", "bfloat16")),
    ]


FAMILIES = {
    module.name: importlib.import_module(f"{families.__name__}.{module.name}").CASES
    for module in sorted(pkgutil.iter_modules(families.__path__), key=lambda module: module.name)
}
CASES = [case for cases in FAMILIES.values() for case in cases]
