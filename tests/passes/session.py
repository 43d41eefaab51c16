"""Exports a function or a module, and runs its graph with some of the passes."""

import io
import warnings

import onnx
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ortmodule import _core
from ortmodule.engine.session import DTYPES, Run, Session
from ortmodule.lowering import symbolics
from ortmodule.lowering.decompositions import DEFINITIONS
from tests import exact
from tests.tolerances import SANITIZED

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# Difference allowed, relative to the largest number of each tensor: the passes change the order of roundings.
# In a sanitized build a graph without any pass is 3.2e-6 off in attention's sums.
TOLERANCE = {F32: 4e-6 if SANITIZED else 2e-6, F64: 1e-13, BF16: 2e-2}
CLEAN_UP = _core.passes()["clean_up"]
# What passes look for is told of clean graphs.
ALL_PASSES, NO_PASSES = 0, sum(_core.passes().values()) - CLEAN_UP


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *operands):
        return self.function(*operands)


class Defined(TorchFunctionMode):
    """Attention as a capture defines it: the exporter writes another one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.scaled_dot_product_attention:
            names = {"attn_mask": "mask", "dropout_p": "dropout"}
            kwargs = {names.get(name, name): value for name, value in (kwargs or {}).items()}
            function = DEFINITIONS["aten::scaled_dot_product_attention"]
        return function(*args, **(kwargs or {}))


def export(module, operands):
    names = [f"x{i}" for i in range(len(operands))]
    dims = {name: {i: f"{name}_{i}" for i in range(x.dim())} for name, x in zip(names, operands, strict=True)}
    data = io.BytesIO()
    with warnings.catch_warnings(), symbolics.installed(), Defined():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            tuple(operands),
            data,
            dynamo=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            export_params=False,
            keep_initializers_as_inputs=True,
            opset_version=18,
            input_names=names,
            output_names=["y"],
            dynamic_axes=dims,
        )
    session = Session(data.getvalue())
    session.exported = data.getvalue()
    return session


def check_against_pytorch(module, session, tensors, dy, results, **options):
    """Results of `run` in PyTorch, which gets the same masks, and in float64: see tests/exact.py."""
    feeds = dict(zip(session.inputs, tensors, strict=True))
    model = onnx.load_from_string(session.exported)
    exact.check_run(module, model, feeds, results, dy, tensors[0].dtype, **options)


ROOM = 1 << 40  # bytes, in which everything is kept


def run(session, tensors, dy, disabled, budget=0):
    """The passes that fired, the result, the gradients. ``budget``: bytes, for the plan; 0: none."""
    specs = tuple((DTYPES[t.dtype], tuple(t.shape)) for t in tensors)
    plan = session.model.plan(specs, (True,) * len(tensors), (True,), disabled, (), None, False, -1, 0, budget)
    result = Run(plan, tensors, 0)
    return found(plan), [result.outputs[0], *result.backward([dy])]


def found(plan):
    """How often each pass has, but for the one that finds something everywhere."""
    return {name: times for name, times in plan.fired.items() if name != "clean_up"}


def difference(ours, theirs):
    scale = max(1e-30, theirs.double().abs().max().item())
    return (ours.double() - theirs.double()).abs().max().item() / scale
