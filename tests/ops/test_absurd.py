"""Operators with absurd attributes, constants and operands: a result or a sentence, never a crash or a hang.

Every case of the list is changed in one place or two, at random but always in the same way; sizes are so huge that
nothing they lead to can be allocated. Under the sanitizers this is where a missing check shows."""

import random

import numpy as np
import onnx
import pytest
import torch
from onnx import AttributeProto, helper, numpy_helper

from ortmodule import Error
from ortmodule.engine.session import Session
from tests.ops.cases import FAMILIES
from tests.ops.harness import Trial, value_info

HUGE = [2**40, 2**46, 2**63 - 1, -(2**40), -(2**63)]
INTS = [-1, 0, 1, 2, 3, 7, -2, -9, 100, *HUGE]
FLOATS = [float("nan"), float("inf"), -1.0, 0.0, 1e38]
WORDS = [b"", b"nonsense", b"SAME_UPPER", b"sum", b"->", b"ij,jk->ik", b"...->...", b"reflect", b"wrap"]
ATTRIBUTES = ["axis", "axes", "pads", "strides", "dilations", "kernel_shape", "group", "keepdims", "k", "to", "mode"]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.float64, torch.uint8, torch.bfloat16]


def changed(numbers, choices, draw):
    """A list of numbers: emptied, shortened, lengthened, or with others in some places."""
    how = draw.randrange(5)
    if how == 0 or not numbers:
        return [draw.choice(choices)] * draw.randrange(3)
    if how == 1:
        return numbers[:-1]
    if how == 2:
        return [*numbers, draw.choice(choices)]
    places = draw.sample(range(len(numbers)), draw.choice([1, 1, len(numbers)]))
    return [draw.choice(choices) if i in places else n for i, n in enumerate(numbers)]


def change_attribute(attribute, draw):
    name, kind, value = attribute.name, attribute.type, helper.get_attribute_value(attribute)
    if kind == AttributeProto.INT:
        attribute.i = draw.choice(INTS)
    elif kind == AttributeProto.FLOAT:
        attribute.f = draw.choice(FLOATS)
    elif kind == AttributeProto.STRING:
        attribute.s = draw.choice(WORDS)
    elif kind in (AttributeProto.INTS, AttributeProto.FLOATS):
        choices = INTS if kind == AttributeProto.INTS else FLOATS
        attribute.CopyFrom(helper.make_attribute(name, changed(list(value), choices, draw), attr_type=kind))


def change_constant(constant, draw):
    array = numpy_helper.to_array(constant)
    if array.dtype in (np.int64, np.int32):
        limits = np.iinfo(array.dtype)
        numbers = [draw.choice(INTS)] if array.ndim == 0 else changed(array.reshape(-1).tolist(), INTS, draw)
        array = np.clip(np.array(numbers, dtype=object), limits.min, limits.max).astype(array.dtype)
        array = array.reshape(()) if not constant.dims else array
    elif array.dtype in (np.float32, np.float64):
        array = np.array(changed(array.reshape(-1).tolist(), FLOATS, draw), dtype=array.dtype)
    constant.CopyFrom(numpy_helper.from_array(array, constant.name))


def change_operand(graph, operands, i, draw):
    x = operands[i]
    how = draw.randrange(6)
    if how == 0:
        x = x.unsqueeze(0)
    elif how == 1 and x.dim():
        x = x[:0] if draw.random() < 0.5 or not len(x) else x[0]
    elif how == 2 and x.dim():
        x = torch.cat([x, x], -1)
    elif how == 3:
        x = x.to(draw.choice(DTYPES))
    elif x.dtype in (torch.int64, torch.int32) and x.numel():
        limits, x = torch.iinfo(x.dtype), x.clone()
        x.view(-1)[draw.randrange(x.numel())] = max(min(draw.choice(INTS), limits.max), limits.min)
    operands[i] = x.contiguous()
    if draw.random() < 0.9:  # otherwise the model declares what it was
        graph.input[i].CopyFrom(value_info(graph.input[i].name, x))


def change_arity(node, draw):
    how = draw.randrange(4)
    if how == 0 and node.input:
        del node.input[-1:]
    elif how == 1:
        node.input.append(draw.choice(["nowhere", *node.input]))
    elif how == 2 and node.input:
        node.input[draw.randrange(len(node.input))] = ""
    else:
        node.output.append("more")


def change(model, operands, draw):
    graph = model.graph
    node = draw.choice(graph.node)
    ways = [lambda a=a: change_attribute(a, draw) for a in node.attribute] * 3
    ways += [lambda c=c: change_constant(c, draw) for c in graph.initializer] * 3
    ways += [lambda i=i: change_operand(graph, operands, i, draw) for i in range(len(operands))]
    ways += [lambda: change_arity(node, draw)]
    name = draw.choice(ATTRIBUTES)
    if name not in [a.name for a in node.attribute]:
        numbers = [draw.choice(INTS) for _ in range(draw.randrange(1, 5))]
        ways += [lambda: node.attribute.append(helper.make_attribute(name, draw.choice([numbers, numbers[0]])))]
    draw.choice(ways)()


def attempt(model, operands, training):
    session = Session(model.SerializeToString())
    needs = [training and x.is_floating_point() for x in operands]
    run = session.run(operands, needs, [True] * len(session.outputs) if training else None)
    if training:
        wanted = zip(run.outputs, run.plan.output_grads, strict=True)
        run.backward([torch.ones_like(y) if spec else None for y, spec in wanted])


@pytest.mark.parametrize("family", FAMILIES)
def test_absurd(family, request):
    refused = 0
    rounds = 40 if request.config.getoption("--full") else 1
    for case in FAMILIES[family]:
        for i in range(rounds):
            draw = random.Random(f"{case.label} {i}")
            trial = Trial(case, draw.choice(case.dtypes))
            model, operands = onnx.ModelProto(), [trial.tensors[k].clone() for k in trial.fed]
            model.CopyFrom(trial.model)
            for _ in range(draw.choice([1, 1, 1, 2])):
                change(model, operands, draw)
            try:
                attempt(model, operands, training=draw.random() < 0.5)
            except (Error, ValueError, TypeError, MemoryError) as refusal:
                assert len(str(refusal)) > 8, repr(refusal)
                refused += 1
    assert refused, "nothing was absurd"
