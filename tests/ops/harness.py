"""Makes a one-node model of a case, runs it in the engine and in PyTorch, and compares both."""

import contextlib
import math
import os
from dataclasses import dataclass
from functools import cached_property

import onnx
import torch

from ortmodule import _core
from tests.tolerances import MOST_UNSEEN, OPERATOR, Rounding, bounds, largest, unseen

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

NARROW = (torch.bfloat16, torch.float16)
CANCELLED = 64  # roundings: gradients of drawn sizes that are no larger are zeros that did not quite cancel
GUARD = 128  # bytes before and after every operand
ALIGNED = 256  # what a run's memory has to be aligned to, on a GPU
#: Where the engine's side is: the CPU, or a GPU (scripts/gpu).
DEVICE = torch.device(os.environ.get("ORTMODULE_TEST_DEVICE", "cpu"))
ON_GPU = DEVICE.type == "cuda" or _core.emulated


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


def build_model(case, dtype, tensors, results):
    """The case as an ONNX model of one node, or of its `nodes`: rows ("Add", "x0 x1", "sum", {attributes}) in which
    x0, x1, ... are the operands and y0, y1, ... the outputs; lists of names where one is absent. `results` give the
    outputs' types and ranks."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(tensors)]
    outputs = [f"y{i}" if wanted else "" for i, wanted in enumerate(case.wanted)]
    rows = [(op, _listed(ins), _listed(outs), *attrs) for op, ins, outs, *attrs in case.nodes]
    graph = onnx.helper.make_graph(
        [make_node(*row) for row in rows or [(case.op, names, outputs, case.attributes(dtype))]],
        "case",
        [value_info(names[i], tensors[i]) for i in fed_operands(case, tensors)],
        [value_info(name, y) for name, y in zip(filter(None, outputs), results, strict=True)],
        initializer=[tensor_proto(tensors[i], names[i]) for i in case.const if tensors[i] is not None],
    )
    opsets = [onnx.helper.make_opsetid("", case.opset), onnx.helper.make_opsetid("ortmodule", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _listed(names):
    return names.split() if isinstance(names, str) else names


def make_node(op, inputs, outputs, attrs=None):
    """`op` of another domain than ONNX's is written "domain::op"."""
    domain, _, op = op.rpartition("::")
    attrs = {k: tensor_proto(v) if isinstance(v, torch.Tensor) else v for k, v in (attrs or {}).items()}
    return onnx.helper.make_node(op, inputs, outputs, name=f"node_{op}", domain=domain, **attrs)


# --- PyTorch's side ---------------------------------------------------------------------------------------------------


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


def upstream(outputs):
    """A random gradient for every output that can have one."""
    generator = torch.Generator().manual_seed(0)
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


def reference(case, tensors, wrt=(), wide=True, device="cpu"):
    """PyTorch's answer, and the gradients of the outputs it is for. Narrow types are computed in float32 from the same
    numbers and rounded once, or, if not `wide`, as PyTorch computes them. `device`: where it is computed."""
    leaves = [x if x is None else (widen(x) if wide else x).detach().clone().to(device) for x in tensors]
    for i in wrt:
        leaves[i].requires_grad_()
    found = wanted_outputs(case, leaves)
    outputs = [y.detach().to("cpu", d) for y, d in zip(found, output_types(case, tensors, found), strict=True)]
    dys, grads = upstream(outputs) if wrt else [], [None] * len(tensors)
    reached = [
        (y, dy.to(y.device, y.dtype)) for y, dy in zip(found, dys, strict=False) if dy is not None and y.requires_grad
    ]
    if reached:
        ys, upstreams = zip(*reached, strict=True)
        known = torch.autograd.grad(ys, [leaves[i] for i in wrt], upstreams, allow_unused=True)
        for i, g in zip(wrt, known, strict=True):
            grads[i] = None if g is None else g.to("cpu", tensors[i].dtype)
    return Result(outputs, grads), dys


# --- both sides -------------------------------------------------------------------------------------------------------


class Trial:
    """A case at one type with its operands: PyTorch's answer, and runs of the engine. What a run is given, and what it
    writes, lies `shift` elements behind an aligned address."""

    def __init__(self, case, dtype, tensors=None, shift=0):
        self.case, self.dtype, self.shift = case, dtype, shift
        self.tensors = case.tensors(dtype) if tensors is None else tensors
        self.fed = fed_operands(case, self.tensors)
        self.wrt = differentiable(case, dtype) if case.has_gradient else []
        self.expected, self.dys = reference(case, self.tensors, self.wrt)
        self.model = build_model(case, dtype, self.tensors, self.expected.outputs)
        self.probes = []  # plans that ran to find out what PythonOp returns

    @cached_property
    def session(self):
        from ortmodule.engine.session import Session

        return Session(self.model.SerializeToString(), nodes=[] if self.case.call is None else [self._node()])

    def _node(self):
        from ortmodule.core import pytree
        from ortmodule.host.host_node import Modes, Node

        count = len(self.tensors)
        arguments = pytree.flatten((tuple(self.tensors), {}))[1]
        needs, flags = [i in self.wrt for i in range(count)], [True] * (len(self.case.wanted) - 1)
        node = Node("aten", "case", self.case.call, arguments, list(range(count)), needs, frozenset(), Modes.now())
        node.flags = flags
        return node

    def plan(self, training, tensors=None):
        """The plan; sizes that data decides are found in `tensors`, the case's own if there are no others."""
        from ortmodule.engine.session import Run, gpu_of

        tensors = self.tensors if tensors is None else tensors
        specs = [(dtype_name(self.tensors[i].dtype), tuple(self.tensors[i].shape)) for i in self.fed]
        needs_grad = [training and i in self.wrt for i in self.fed]
        dys = [dy is not None for dy in self.dys] if training else None
        sizes, calls, given = (), self.session.calls(), [tensors[i].contiguous().to(DEVICE) for i in self.fed]
        gpu = gpu_of(given or [torch.empty(0, device=DEVICE)])
        while (plan := self.session.plan(specs, needs_grad, dys, sizes, calls, gpu)).prologue:
            if plan.probe:
                self.probes.append(plan)
                Run(plan, given, 0, calls=calls)
                self.session.plans.clear()
            else:
                sizes += self.session.next_sizes(plan, given, 0)()
        return plan

    def run(self, training=False, tensors=None, seed=0):
        """The engine's answer. All memory it is given lies between guard bytes, and what it has to write holds NaN."""
        plan, tensors = self.plan(training, tensors), self.tensors if tensors is None else tensors
        given = [Box(tensors[i].dtype, tensors[i].shape, tensors[i], self.shift) for i in self.fed]
        arena = Box(torch.uint8, (plan.arena_bytes,))
        outputs, writes = made(plan.outputs, self.shift), made((spec for _, spec in plan.writes), self.shift)
        grads, found = [], [None] * len(tensors)

        memory = arena.tensor, tensors_of(given), tensors_of(outputs)
        calls = self.session.calls()
        if calls is not None:
            calls.device = DEVICE
        plan.forward(*memory, tensors_of(writes), seed, calls)
        if training and any(plan.input_grads):
            grads = made(plan.input_grads, self.shift)
            dys = [
                Box(dy.dtype, dy.shape, dy, self.shift).tensor if spec else None
                for spec, dy in zip(plan.output_grads, self.dys, strict=True)
            ]
            plan.backward(*memory, dys, tensors_of(grads), seed, calls)
            for i, grad in zip(self.fed, tensors_of(grads), strict=True):
                found[i] = None if grad is None else grad.cpu()

        assert all(box.untouched() for box in given), "an operand was written"
        boxes = [arena, *given, *outputs, *writes, *filter(None, grads)]
        assert all(box.fenced() for box in boxes), "memory beyond the ends of a tensor was written"
        return Result([y and y.tensor.cpu() for y in outputs], found)

    def check_forward(self, ours=None, expected=None, sees=True):
        ours, expected = (ours or self.run()).outputs, expected or self.expected.outputs
        assert len(ours) == len(expected), f"{len(ours)} outputs, PyTorch has {len(expected)}"
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_same(a, b, f"output {i}", self.case.tol, self.case.share, sees)

    def check_gradient(self, sees=True):
        ours = self.run(training=True)
        self.check_forward(ours, sees=sees)
        try:
            for i in self.wrt:
                self.check_gradient_of(i, ours.grads[i], self.expected.grads[i], sees)
        except Blind:
            raise
        except AssertionError:
            if not ON_GPU or self.dtype != "float32":
                raise
            self.check_rounding()  # long sums, which PyTorch adds up in another order on the CPU

    def check_gradient_of(self, i, ours, expected, sees):
        """No gradient and a gradient of zeros are the same answer."""
        if ours is None and expected is None:
            return
        zeros = torch.zeros_like(self.tensors[i])
        ours, expected = [zeros if g is None else g for g in (ours, expected)]
        cancels = bool(expected.isfinite().all()) and largest(expected) < CANCELLED * self.epsilon
        if i in self.case.vanishing or not sees and cancels:
            bound = OPERATOR[expected.dtype][1]
            assert largest(expected) <= bound, f"the gradient of operand {i} does not vanish in PyTorch"
            assert largest(ours) <= bound and bool(ours.isfinite().all()), (
                f"the gradient of operand {i} is {ours}, not 0"
            )
            return
        assert_same(ours, expected, f"gradient of operand {i}", self.case.tol, self.case.share, sees)

    @property
    def epsilon(self):
        """Of the type that is computed in."""
        return torch.finfo(torch.float64 if self.dtype == "float64" else torch.float32).eps

    def check_drawn(self, gradients=True):
        """For operands, sizes and arguments drawn at random: rounding may be all that differs."""
        try:
            self.check_forward(sees=False)
        except AssertionError:
            if self.dtype in ("bfloat16", "float16"):  # rounded between operators, as here
                self.check_forward(expected=wanted_outputs(self.case, self.tensors), sees=False)
            else:
                self.check_rounding(training=False)
        if not (gradients and self.wrt):
            return
        try:
            self.check_gradient(sees=False)
        except AssertionError:
            self.check_rounding()

    def check_rounding(self, training=True):
        """Results and gradients where PyTorch's own are inexact: ours may be off the float64 ones four times as far as
        those that PyTorch computes in the same type on the same device, or as roundings to the type on the way
        (:class:`Rounding`) move the float64 ones, or as far as is tolerated anyway."""
        wide = [x.double() if x is not None and x.is_floating_point() else x for x in self.tensors]
        exact, _ = reference(self.case, wide, self.wrt)
        moved = []
        for seed in range(4):
            with Rounding(seed, self.epsilon):
                moved.append(reference(self.case, wide, self.wrt)[0])
        ours, theirs = self.run(training=training), self.expected
        if DEVICE.type != "cpu":
            with contextlib.suppress(RuntimeError):  # a reference may make tensors on the CPU
                theirs, _ = reference(self.case, self.tensors, self.wrt, device=DEVICE)
        if self.dtype in ("bfloat16", "float16"):
            with contextlib.suppress(RuntimeError):  # PyTorch has no kernel for the narrow type
                theirs, _ = reference(self.case, self.tensors, self.wrt, wide=False)
        for i, (a, b, c) in enumerate(zip(ours.outputs, theirs.outputs, exact.outputs, strict=True)):
            if a.is_floating_point():
                self._check_near(f"output {i}", a, b, c, [x.outputs[i] for x in moved])
            else:
                assert_same(a, b, f"output {i}")
        for i in self.wrt if training else ():
            zeros = torch.zeros_like(self.tensors[i])
            sides = [zeros if g is None else g for g in (ours.grads[i], theirs.grads[i], exact.grads[i])]
            self._check_near(f"gradient of operand {i}", *sides, [x.grads[i] for x in moved])

    def _check_near(self, what, a, b, c, moved):
        """Of `check_rounding`: ours, PyTorch's, the exact one, and what this is with roundings on the way."""
        relative, share = OPERATOR[a.dtype]
        by = max((largest(x - c) for x in moved if x is not None), default=0.0)  # a gradient may be None
        # Never so far that zeros would do, unless all of it is rounding.
        most = min(4 * max(largest(b - c), by), largest(c) / 2)
        allowed = bounds(c, self.case.tol * relative, self.case.tol * share).clamp(min=most)
        off = (a - c).abs()
        if largest(c) < max(CANCELLED * self.epsilon, 4 * by):
            allowed = torch.full_like(off, share)
        right = (off <= allowed) | (a == b) | (a.isnan() & b.isnan())  # both may overflow in 16 bits
        if not right.all():
            at = (~right).nonzero()[0].tolist()
            found = [x[tuple(at)].item() for x in (a, b, c)]
            raise AssertionError(
                f"{what} at {at}: {found[0]}, in PyTorch {found[1]}, exactly {found[2]}; "
                f"{allowed[tuple(at)]:.3g} are allowed"
            )

    def slope(self, i, direction, step=1e-5):
        """Central difference of sum(dy * y) along a direction of operand i, from the engine's own forward."""

        def f(sign):
            moved = list(self.tensors)
            moved[i] = self.tensors[i] + sign * step * direction
            outputs = self.run(tensors=moved).outputs
            return math.fsum(float((dy * y).sum()) for dy, y in zip(self.dys, outputs, strict=True) if dy is not None)

        return (f(+1) - f(-1)) / (2 * step)


class Box:
    """A tensor between guard bytes, `shift` elements behind an aligned address."""

    def __init__(self, dtype, shape, contents=None, shift=0):
        self.begin = GUARD + shift * dtype.itemsize
        self.end = self.begin + math.prod(shape) * dtype.itemsize
        room = torch.full((self.end + GUARD + ALIGNED,), 0xFF, dtype=torch.uint8, device=DEVICE)
        start = -(room.data_ptr() + GUARD) % ALIGNED
        self.memory = room[start : start + self.end + GUARD]
        self.tensor = self.memory[self.begin : self.end].view(dtype).view(shape)
        self.before = None
        if contents is not None:
            self.tensor.copy_(contents)
            self.before = self.memory.clone()

    def untouched(self):
        return torch.equal(self.memory, self.before)

    def fenced(self):
        return bool((self.memory[: self.begin] == 0xFF).all() and (self.memory[self.end :] == 0xFF).all())


def made(specs, shift=0):
    """Memory for each (dtype name, shape)."""
    return [None if spec is None else Box(getattr(torch, spec[0]), spec[1], None, shift) for spec in specs]


def tensors_of(boxes):
    return [box and box.tensor for box in boxes]


# --- comparing --------------------------------------------------------------------------------------------------------


class Blind(AssertionError):
    """A comparison that most other results would pass: the case wants other operands."""


def assert_same(ours, expected, what, tol=1.0, share=1.0, sees=True):
    """Same type, shape and numbers: NaN equals NaN, integers and infinities exactly, floats within `tol` times the
    tolerance, of which the part that counts for all elements is `share` as large. Raises Blind where zeros would do for
    most elements, if it is to see more (`sees`)."""
    assert ours.dtype == expected.dtype, f"{what} is {ours.dtype}, PyTorch's is {expected.dtype}"
    assert ours.shape == expected.shape, f"{what} has shape {list(ours.shape)}, PyTorch's {list(expected.shape)}"
    relative, absolute = (tol * x for x in OPERATOR.get(expected.dtype, (0, 0)))
    absolute *= share
    if relative + absolute >= 1:
        raise Blind(f"{what}: zeros would pass for anything at {tol} times the tolerance")
    if expected.dtype == torch.int64:  # beyond 2^53 doubles are not exact
        wrong = ours != expected
    else:
        a, b = ours.detach().double(), expected.detach().double()
        bound = bounds(expected, relative, absolute)
        close = (a - b).abs() <= bound
        wrong = ~torch.where(b.isfinite(), close, (a == b) | (a.isnan() & b.isnan()))
        if sees and not wrong.any() and (missed := unseen(expected, bound)) > MOST_UNSEEN:
            raise Blind(f"{what}: zeros would do for {missed:.1%} of the elements: give the case other operands")
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{what} differs in {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: "
            f"{ours[tuple(at)].item()} where PyTorch has {expected[tuple(at)].item()}"
        )
