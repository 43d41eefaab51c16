"""Fuzzes the models that `graphs` draws, forward and backward, beside PyTorch.

python -m tests.fuzz.pytorch [--seconds S] [NUMBER...]

What PyTorch computes (ortmodule/debug/onnx_interpreter.py) is kept of a model, and the rest left out. Results may
differ as far as PyTorch's do when every result of every node is rounded otherwise, as in targets/graphs.c.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import onnx
import torch

from ortmodule import InvalidModelError, UnsupportedError
from ortmodule.core.dtypes import TORCH_TYPES
from ortmodule.core.errors import Unknown
from ortmodule.core.onnx_utils import RANDOM, constants, without_dead
from ortmodule.debug.onnx_interpreter import evaluate
from ortmodule.engine.session import Session
from tests.fuzz.loop import main

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}/sanitize/fuzz/models"
#: What PyTorch raises for a node that it does not compute so.
REFUSED = (
    Unknown,
    RuntimeError,
    IndexError,
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
    AssertionError,
)
#: How far one rounding goes.
ROUNDING = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
FEW, MANY, TIMES = 3, 12, 32
#: Above this whether something overflows depends on the order of operations.
HUGE = {torch.float64: 1e100, torch.float32: 1e15, torch.bfloat16: 1e15, torch.float16: 100.0}


def drawn(draw):
    """The model of some bytes."""
    data = bytes(draw.randrange(256) for _ in range(draw.choice([24, 60, 120, 250, 500])))
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder, "bytes"), Path(folder, "model")
        path.write_bytes(data)
        environment = {**os.environ, "FUZZ_MODEL": str(model), "LD_PRELOAD": ""}
        done = subprocess.run([PROGRAM, path], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return onnx.load(model)


def typed(model):
    return all(value.type.tensor_type.elem_type in TORCH_TYPES for value in model.graph.input)


def inputs_of(model, seed):
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dtype, shape = TORCH_TYPES[kind.elem_type], [d.dim_value for d in kind.shape.dim]
        if dtype.is_floating_point:
            x = (torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2).to(dtype)
        else:
            x = torch.randint(0, 4, shape, generator=generator)
            x = (x > 0) if dtype == torch.bool else x.to(dtype)
        tensors[value.name] = x
    return tensors


def is_rough(node, values):
    """PyTorch's second derivative of lgamma is off by 5e-10, whatever the type."""
    return node.op_type == "Digamma" and values[node.input[0]].dtype == torch.float64


def without_unknown(model, values):
    """The model without what PyTorch does not compute, or draws; None if nothing of it is left. `values` get all
    results."""
    kept = []
    for node in model.graph.node:
        if node.op_type in RANDOM or any(name and name not in values for name in node.input):
            continue
        if is_rough(node, values):
            continue
        try:
            evaluate([node], values, {})
        except REFUSED:
            continue
        kept.append(node)
    outputs = [value for value in model.graph.output if value.name in values]
    made = [name for node in kept for name in node.output if name in values]
    if not outputs and made:
        outputs = [onnx.helper.make_empty_tensor_value_info(made[-1])]
    if not made or not outputs:
        return None
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.node[:], changed.graph.output[:], changed.graph.value_info[:]
    changed.graph.node.extend(kept)
    changed.graph.output.extend({value.name: value for value in outputs}.values())
    for value in changed.graph.output:
        x = values[value.name]
        kind = next(number for number, dtype in TORCH_TYPES.items() if dtype == x.dtype)
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, list(x.shape)))
    return without_dead(changed)


class Reference:
    """PyTorch's results: outputs, then gradients of the inputs that need one."""

    def __init__(self, model, inputs, needs, output_grads):
        self.model, self.inputs, self.needs, self.output_grads = model, inputs, needs, output_grads
        self.constants = constants(model)
        self.overflows = False

    def results(self, size=0.0, seed=0, wide=False):
        """`size`: so many units of a type every result is off, drawn by `seed`. `wide`: computed in float64."""
        generator = torch.Generator().manual_seed(seed)
        values, leaves = {name: widened(x) if wide else x for name, x in self.constants.items()}, []
        coarsest = 0.0

        def disturbed(x):
            if not size or not x.is_floating_point():
                return x
            noise = torch.randint(-1, 2, x.shape, generator=generator).to(torch.float64) * size * coarsest
            y = x + (x.detach().double() * noise).to(x.dtype)
            self.overflows |= not bool((y.detach().double().abs() < HUGE[x.dtype]).all())
            return y

        for name, x in self.inputs.items():
            leaf = (widened(x) if wide else x).detach().clone().requires_grad_(self.needs[name])
            coarsest = max(coarsest, ROUNDING.get(x.dtype, 0.0))
            leaves.append(leaf)
            values[name] = leaf
        for node in self.model.graph.node:
            evaluate([node], values, {})
            for name in node.output:
                if name in values:
                    coarsest = max(coarsest, ROUNDING.get(values[name].dtype, 0.0))
                    values[name] = widened(values[name]) if wide else values[name]
                    values[name] = _Disturbed.apply(values[name], disturbed) if size else values[name]
        outputs = [values[value.name] for value in self.model.graph.output]
        pairs = [
            (y, dy) for y, dy in zip(outputs, self.output_grads, strict=True) if dy is not None and y.requires_grad
        ]
        wanted = [x for x in leaves if x.requires_grad]
        grads = [None] * len(wanted)
        if pairs and wanted:
            given = [dy.to(y.dtype) for y, dy in pairs]
            grads = torch.autograd.grad([y for y, _ in pairs], wanted, given, allow_unused=True)
        found = iter(grads)
        return [y.detach() for y in outputs] + [next(found) if x.requires_grad else None for x in leaves]


def widened(x):
    return x.double() if x.is_floating_point() else x


class _Disturbed(torch.autograd.Function):
    """Moves a value, and its gradient on the way back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        ctx.set_materialize_grads(False)
        if not x.is_floating_point():
            ctx.mark_non_differentiable(x)
            return x
        return change(x).clone()

    @staticmethod
    def backward(ctx, dy):
        return None if dy is None else ctx.change(dy), None


def off(a, b):
    """How far apart. What overflows is an infinity or, one operation later, no number."""
    a, b = a.double(), b.double()
    same = (a == b) | ~(a.isfinite() | b.isfinite())
    return torch.where(same, 0.0, (a - b).abs())


def differs(ours, expected, others, overflows):
    """None, or what differs."""
    if ours.dtype != expected.dtype or ours.shape != expected.shape:
        return f"{ours.dtype} {list(ours.shape)}, in PyTorch {expected.dtype} {list(expected.shape)}"
    if not expected.numel():
        return None
    spreads = torch.stack([off(other, expected) for other in others])
    finite = spreads.nan_to_num(0, 0, 0)
    largest = expected.double().nan_to_num(0, 0, 0).abs().max()
    unit = ROUNDING.get(expected.dtype, 0.0)
    allowed = TIMES * finite.max() + 8 * unit * largest + (1e-6 if expected.dtype == torch.float16 else 1e-36)
    wrong = ~(off(ours, expected) <= allowed)
    if overflows:
        wrong &= ours.double().isfinite() & expected.double().isfinite()
    varies = spreads != 0
    if expected.is_floating_point():
        varies &= ~torch.stack([other.isfinite() & expected.isfinite() for other in others])
    wrong &= ~varies.any(0)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{list(at)} is {ours[at].item():.9g}, in PyTorch {expected[at].item():.9g}; {allowed:g} is allowed"


def zeros_for_none(results, like):
    return [torch.zeros_like(x) if r is None else r for r, x in zip(results, like, strict=True)]


def case(draw):
    model, seed = drawn(draw), draw.randrange(1 << 30)
    if not typed(model):
        return "with a list as an input"
    inputs = inputs_of(model, seed)
    model = without_unknown(model, constants(model) | inputs)
    if model is None:
        return "not computed by PyTorch"
    needs = {name: x.is_floating_point() and draw.random() < 0.9 for name, x in inputs.items()}
    reference = Reference(model, inputs, needs, [None] * len(model.graph.output))
    outputs = reference.results()[: len(model.graph.output)]
    generator = torch.Generator().manual_seed(seed + 1)
    reference.output_grads = grads = [
        (torch.rand(y.shape, generator=generator, dtype=torch.float64) * 4 - 2).to(y.dtype)
        if y.is_floating_point() and draw.random() < 0.9
        else None
        for y in outputs
    ]
    try:
        expected = reference.results()
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        return "without a derivative in PyTorch"
    try:
        run = Session(model.SerializeToString()).run(
            [*inputs.values()], [*needs.values()], [dy is not None for dy in grads], seed
        )
    except (UnsupportedError, InvalidModelError):
        return "refused by the engine"
    ours = [*run.outputs, *(run.backward(grads) if run.plan.differentiates else [None] * len(needs))]
    like = [*outputs, *inputs.values()]
    ours, expected = zeros_for_none(ours, like), zeros_for_none(expected, like)
    names = [value.name for value in model.graph.output] + [f"the gradient of {name}" for name in inputs]
    others = []
    try:  # how far PyTorch's own rounding inside of nodes goes
        exact = zeros_for_none(reference.results(wide=True), like)
        others.append([x.to(y.dtype) for x, y in zip(exact, like, strict=True)])
    except REFUSED:
        pass
    for count in (FEW, MANY):
        while len(others) < count:
            others.append(zeros_for_none(reference.results(2 if len(others) < FEW else 8, len(others) + 1), like))
        found = [
            (name, said)
            for i, name in enumerate(names)
            if (said := differs(ours[i], expected[i], [other[i] for other in others], reference.overflows))
        ]
        if not found:
            return None
    name, said = found[0]
    raise AssertionError(f"{name}: {said}\n{onnx.printer.to_text(model)}")


if __name__ == "__main__":
    sys.exit(main(case, "pytorch", __doc__))
