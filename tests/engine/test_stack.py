"""No array on the engine's stack is as large as a model or its data; threads may have small stacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parents[2]
LEAST = int(re.search(r"LEAST_STACK = (\d+) << 10", (ROOT / "csrc/core/scratch.h").read_text())[1])  # KiB

PROGRAM = """
import sys, threading
import torch
from ortmodule.engine.session import Session

which, stack = sys.argv[1], int(sys.argv[2]) << 10
torch.set_num_threads(2)
model = Session(sys.stdin.buffer.read())
x = torch.randn(256, 1024)
specs = [("float32", tuple(x.shape))]
trains = which == "Fused"
plan = model.plan(specs, [trains], [True] if trains else None)
outputs, grads = plan.empty_outputs(torch.Tensor), plan.empty_input_grads(torch.Tensor)
arena = torch.empty(plan.arena_bytes + 64, dtype=torch.uint8)
arena = arena[-arena.data_ptr() % 64:]
dys = [spec and torch.ones(spec[1]) for spec in plan.output_grads]
assert not trains or any(name.startswith("Fused") for name, *_ in plan.code()), plan.code()

def run():
    plan.forward(arena, [x], outputs, [], 0)
    if trains:
        plan.backward(arena, [x], outputs, dys, grads, 0)

threading.stack_size(stack)
thread = threading.Thread(target=run)
thread.start()
thread.join()
print("done")
"""


def model_of(nodes, rank=2):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", "columns"][:rank])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "stack", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return model.SerializeToString()


def chain():
    """Steps, and totals of their rows on the way."""
    nodes, last = [], "x"
    for i, op in enumerate(["Sigmoid", "Tanh", "Softplus", "Erf", "Sigmoid", "Tanh", "Mish", "Elu"]):
        nodes += [helper.make_node(op, [last], [f"a{i}"]), helper.make_node("Mul", [f"a{i}", "x"], [f"b{i}"])]
        last = f"b{i}"
    return nodes, last


def pointwise():
    nodes, last = chain()
    return model_of([*nodes, helper.make_node("Identity", [last], ["y"])])


def reduced():
    nodes, last = chain()
    return model_of([*nodes, helper.make_node("ReduceSum", [last], ["y"], keepdims=0)])


def rows():
    nodes, last = chain()
    axis = helper.make_node("Constant", [], ["axis"], value_ints=[1])
    total = [helper.make_node("ReduceSum", [last, "axis"], ["t"]), helper.make_node("Sub", [last, "t"], ["d"])]
    return model_of([axis, *nodes, *total, helper.make_node("Tanh", ["d"], ["y"])])


@pytest.mark.parametrize("make", [pointwise, reduced, rows], ids=lambda make: make.__name__)
def test_chains_in_threads_with_small_stacks(make):
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "Fused", str(LEAST)],
        input=make(), capture_output=True, cwd=ROOT, env={**os.environ, "OMP_STACKSIZE": f"{LEAST}k"}, check=False,
    )  # fmt: skip
    assert b"done" in found.stdout, found.stderr.decode()[-2000:]


def test_many_operands():
    """Of one node: they take more than the stack has."""
    nodes = [helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0), helper.make_node("Reshape", ["s", "one"], ["v"])]
    one = helper.make_node("Constant", [], ["one"], value_ints=[1])
    nodes = [one, *nodes, helper.make_node("Concat", ["v"] * 4000, ["y"], axis=0)]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "Concat", str(LEAST)],
        input=model_of(nodes), capture_output=True, cwd=ROOT, env=os.environ, check=False,
    )  # fmt: skip
    assert b"done" in found.stdout, found.stderr.decode()[-2000:]


def test_nothing_grows_with_data():
    for source in sorted((ROOT / "csrc").rglob("*.[ch]")):
        if source.name != "replay.c":
            assert "alloca(" not in source.read_text(), source
