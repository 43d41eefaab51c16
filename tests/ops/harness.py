"""A case as a one-node model, run by the engine and by PyTorch, and how the two are compared."""

import math
from dataclasses import dataclass
from functools import lru_cache

import onnx
import torch

ONNX_TYPE = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int16: onnx.TensorProto.INT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}

# |x - y| <= relative * |y| + absolute. The 16-bit types allow a few roundings: gradients pass through several nodes.
TOLERANCE = {
    torch.float32: (2e-5, 1e-5),
    torch.float64: (1e-10, 1e-10),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}
NARROW = (torch.bfloat16, torch.float16)
GUARD = 128  # bytes before and after every operand


# --- the model --------------------------------------------------------------------------------------------------------


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def tensor_proto(tensor, name=""):
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return onnx.TensorProto(name=name, data_type=ONNX_TYPE[tensor.dtype], dims=list(tensor.shape), raw_data=raw)


def value_info(name, tensor):
    """Declares type and rank; the dimensions stay open."""
    return onnx.helper.make_tensor_value_info(
        name, ONNX_TYPE[tensor.dtype], [f"{name}_{axis}" for axis in range(tensor.dim())]
    )


def fed_operands(case, tensors):
    """Indices of the operands that are graph inputs."""
    return [i for i, x in enumerate(tensors) if x is not None and i not in case.const]


def build_model(case, dtype, tensors):
    """The case as an ONNX model of one node, or of its `nodes`: rows ("Add", "x0 x1", "sum", {attributes}) in which
    x0, x1, ... are the operands and y0, y1, ... the outputs."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(tensors)]
    outputs = [f"y{i}" if wanted else "" for i, wanted in enumerate(case.wanted)]
    rows = [(op, ins.split(), outs.split(), *attrs) for op, ins, outs, *attrs in case.nodes]
    graph = onnx.helper.make_graph(
        [make_node(*row) for row in rows or [(case.op, names, outputs, case.attributes(dtype))]],
        "case",
        [value_info(names[i], tensors[i]) for i in fed_operands(case, tensors)],
        [value_info(name, y) for name, y in zip(filter(None, outputs), reference(case, tensors).outputs, strict=True)],
        initializer=[tensor_proto(tensors[i], names[i]) for i in case.const if tensors[i] is not None],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", case.opset)], ir_version=8)


def make_node(op, inputs, outputs, attrs=None):
    attrs = {k: tensor_proto(v) if isinstance(v, torch.Tensor) else v for k, v in (attrs or {}).items()}
    return onnx.helper.make_node(op, inputs, outputs, name=f"node_{op}", **attrs)


# --- both sides -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    outputs: list
    grads: list  # per operand of the case; None where there is none


def differentiable(case, dtype):
    """Indices of the operands whose gradients are compared."""
    return [
        i
        for i, spec in enumerate(case.inputs)
        if spec and i not in case.const and spec.grad and getattr(torch, spec.dtype or dtype).is_floating_point
    ]


def upstream(outputs, seed=0):
    """A random gradient for every output that can have one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) if y.is_floating_point() else None
        for y in outputs
    ]


def widen(x):
    return x.float() if x is not None and x.dtype in NARROW else x


def wanted_outputs(case, tensors):
    results = case.ref(*tensors)
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [y for y, wanted in zip(results, case.wanted, strict=False) if wanted]


def output_types(case, tensors, outputs):
    """The types PyTorch gives the outputs, when `outputs` were computed from widened operands."""
    narrow = next((x.dtype for x in tensors if x is not None and x.dtype in NARROW), None)
    if narrow is None:
        return [y.dtype for y in outputs]
    try:
        return [y.dtype for y in wanted_outputs(case, tensors)]
    except RuntimeError:  # PyTorch has no kernel for the narrow type
        return [narrow if y.dtype == torch.float32 else y.dtype for y in outputs]


def reference(case, tensors, wrt=(), dys=()):
    """PyTorch's answer. Narrow types are computed in float32 from the same numbers and rounded once."""
    leaves = [widen(x) if x is None else widen(x).detach().clone() for x in tensors]
    for i in wrt:
        leaves[i].requires_grad_()
    outputs = wanted_outputs(case, leaves)
    grads = [None] * len(tensors)
    reached = [(y, dy.to(y.dtype)) for y, dy in zip(outputs, dys, strict=False) if dy is not None and y.requires_grad]
    if reached:
        ys, upstreams = zip(*reached, strict=True)
        found = torch.autograd.grad(ys, [leaves[i] for i in wrt], upstreams, allow_unused=True)
        for i, g in zip(wrt, found, strict=True):
            grads[i] = None if g is None else g.to(tensors[i].dtype)
    types = output_types(case, tensors, outputs)
    return Result([y.detach().to(d) for y, d in zip(outputs, types, strict=True)], grads)


@lru_cache(maxsize=256)
def session_of(model_bytes):
    from ortmodule.session import Session

    return Session(model_bytes)


def plan_of(case, dtype, tensors, wrt=(), has_dy=None):
    """The engine's plan for the case; `has_dy` tells which outputs get a gradient, None is inference."""
    fed = fed_operands(case, tensors)
    specs = [(dtype_name(tensors[i].dtype), tuple(tensors[i].shape)) for i in fed]
    session = session_of(build_model(case, dtype, tensors).SerializeToString())
    return session.plan(specs, [i in wrt for i in fed], has_dy)


def gradient_plan(case, dtype):
    """The plan that a gradient test of the case runs; a forward test's, where there is no gradient."""
    tensors = case.tensors(dtype)
    wrt = differentiable(case, dtype) if case.has_gradient else []
    outputs = reference(case, tensors).outputs
    return plan_of(case, dtype, tensors, wrt, [y.is_floating_point() for y in outputs] if wrt else None)


def engine(case, dtype, tensors, wrt=(), dys=(), seed=0):
    """The engine's answer. All memory it is given lies between guard bytes, and what it has to write holds NaN."""
    fed = fed_operands(case, tensors)
    plan = plan_of(case, dtype, tensors, wrt, [dy is not None for dy in dys] or None)
    given = [Box(tensors[i].dtype, tensors[i].shape, tensors[i]) for i in fed]
    arena = Box(torch.uint8, (plan.arena_bytes,))
    outputs, writes = made(plan.outputs), made(spec for _, spec in plan.writes)
    grads, found = [], [None] * len(tensors)

    plan.forward(arena.tensor, tensors_of(given), tensors_of(outputs), tensors_of(writes), seed)
    if dys and any(plan.input_grads):
        grads = made(plan.input_grads)
        upstreams = [dy if spec else None for spec, dy in zip(plan.output_grads, dys, strict=True)]
        plan.backward(arena.tensor, tensors_of(given), tensors_of(outputs), upstreams, tensors_of(grads), seed)
        for i, grad in zip(fed, tensors_of(grads), strict=True):
            found[i] = grad

    assert all(box.untouched() for box in given), "an operand was written"
    boxes = [arena, *given, *outputs, *writes, *filter(None, grads)]
    assert all(box.fenced() for box in boxes), "memory beyond the ends of a tensor was written"
    return Result(tensors_of(outputs), found)


class Box:
    """A tensor between guard bytes."""

    def __init__(self, dtype, shape, contents=None):
        self.size = math.prod(shape) * dtype.itemsize
        self.memory = torch.full((GUARD + self.size + GUARD,), 0xFF, dtype=torch.uint8)
        self.tensor = self.memory[GUARD : GUARD + self.size].view(dtype).view(shape)
        if contents is not None:
            self.tensor.copy_(contents)
        self.before = self.memory.clone()

    def untouched(self):
        return torch.equal(self.memory, self.before)

    def fenced(self):
        return bool((self.memory[:GUARD] == 0xFF).all() and (self.memory[GUARD + self.size :] == 0xFF).all())


def made(specs):
    """Memory for each (dtype name, shape)."""
    return [None if spec is None else Box(getattr(torch, spec[0]), spec[1]) for spec in specs]


def tensors_of(boxes):
    return [box and box.tensor for box in boxes]


# --- comparing --------------------------------------------------------------------------------------------------------


def assert_same(ours, expected, what, tol=1.0):
    """Same type, shape and numbers: NaN equals NaN, integers and infinities exactly, floats within the tolerance."""
    assert ours.dtype == expected.dtype, f"{what} is {ours.dtype}, PyTorch's is {expected.dtype}"
    assert ours.shape == expected.shape, f"{what} has shape {list(ours.shape)}, PyTorch's {list(expected.shape)}"
    relative, absolute = (tol * x for x in TOLERANCE.get(expected.dtype, (0, 0)))
    a, b = ours.detach().double(), expected.detach().double()
    if expected.dtype == torch.int64:  # beyond 2^53 doubles are not exact
        wrong = ours != expected
    else:
        finite = b.isfinite()
        close = (a - b).abs() <= relative * b.abs() + absolute
        wrong = ~torch.where(finite, close, (a == b) | (a.isnan() & b.isnan()))
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{what} differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: "
            f"{ours[tuple(at)].item()} where PyTorch has {expected[tuple(at)].item()}"
        )


def assert_same_gradient(ours, expected, like, what, tol=1.0):
    """As assert_same; no gradient and a gradient of zeros are the same answer."""
    if ours is None and expected is None:
        return
    zeros = torch.zeros_like(like)
    assert_same(zeros if ours is None else ours, zeros if expected is None else expected, what, tol)


def slope(run, tensors, i, direction, dys, step):
    """Central difference of sum(dy * y) along a direction of operand i; `run` makes outputs of operands."""

    def f(sign):
        moved = list(tensors)
        moved[i] = tensors[i] + sign * step * direction
        return math.fsum(float((dy * y).sum()) for dy, y in zip(dys, run(moved), strict=True) if dy is not None)

    return (f(+1) - f(-1)) / (2 * step)
