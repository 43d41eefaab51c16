"""Measures how the time and memory of building and planning a graph grow with its size.

    python -m benchmarks.scaling [FAMILY...] [--most 100000] [--seconds 60] [--out results/scaling]

Each family is a graph that has one of its dimensions doubled: nodes, operands of a node, uses of a value, constants,
inputs. Every size is read, planned for inference, with its gradient, and for the least memory that can be reached,
printed, written and run, in a process of its own. Printed are the seconds of the processor that each takes, the growth
of the process at its peak, and the growth of both from the middle of the sizes to the end, per doubling: 2.0 is linear,
4.0 is quadratic. A family ends at ``--most`` or before the size that would take longer than ``--seconds``.
"""

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from onnx import TensorProto, helper

FIRST = 1000


class Graph:
    """An ONNX model that is written node by node; ``x`` is its float32 input."""

    def __init__(self, shape=(4, 8)):
        self.nodes, self.inputs, self.initializers, self.outputs = [], [], [], []
        self.specs, self.needs = [], []
        self.input("x", shape)

    def input(self, name, shape, kind="float32", needs=True):
        element = TensorProto.INT64 if kind == "int64" else TensorProto.FLOAT
        dims = [f"{name}_{axis}" for axis in range(len(shape))]
        self.inputs.append(helper.make_tensor_value_info(name, element, dims))
        self.specs.append((kind, tuple(shape)))
        self.needs.append(needs)
        return name

    def constant(self, values, kind=TensorProto.FLOAT, shape=None):
        name = f"c{len(self.initializers)}"
        self.initializers.append(helper.make_tensor(name, kind, [len(values)] if shape is None else shape, values))
        return name

    def node(self, op, *operands, outputs=1, **attributes):
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(operands), names, name=f"n{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def bytes(self, results):
        """The model; ``results``: its outputs."""
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
        graph = helper.make_graph(self.nodes, "scaling", self.inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ortmodule", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


# --- families: each returns (graph, its result or a list of them) for a size ------------------------------------------


def chain(n):
    """n pointwise nodes, one after the other."""
    g, v = Graph(), "x"
    for i in range(n):
        v = g.node(("Tanh", "Sigmoid")[i % 2], v)
    return g, v


def layers(n):
    """n / 3 linear layers of one weight, with a bias and an activation."""
    g, v = Graph(), "x"
    weight, bias = g.input("w", (8, 8)), g.input("b", (8,))
    for _ in range(n // 3):
        v = g.node("Tanh", g.node("Add", g.node("MatMul", v, weight), bias))
    return g, v


def slices(n):
    """n / 2 slices of one value, added up one by one."""
    g = Graph((n, 8))
    axes, v = g.constant([0], TensorProto.INT64), None
    for i in range(n // 2):
        bounds = [g.constant([k], TensorProto.INT64) for k in (i, i + 1)]
        part = g.node("Slice", "x", *bounds, axes)
        v = part if v is None else g.node("Add", v, part)
    return g, v


def gathers(n):
    """n / 2 rows of one value, taken by an index and added up."""
    g, v = Graph((n, 8)), None
    for i in range(n // 2):
        part = g.node("Gather", "x", g.constant([i], TensorProto.INT64, []), axis=0)
        v = part if v is None else g.node("Add", v, part)
    return g, v


def fan_out(n):
    """One value with n / 2 users, whose results are added up."""
    g = Graph()
    root, v = g.node("Tanh", "x"), None
    for i in range(n // 2):
        part = g.node("LeakyRelu", root, alpha=(i + 1) / n)
        v = part if v is None else g.node("Add", v, part)
    return g, v


def repeated(n):
    """One node that has the same operand n times."""
    g = Graph()
    return g, g.node("Concat", *[g.node("Tanh", "x")] * n, axis=0)


def operands(n):
    """One node with n operands."""
    g = Graph()
    return g, g.node("Concat", *[g.node("LeakyRelu", "x", alpha=(i + 1) / n) for i in range(n)], axis=0)


def split(n):
    """One node with n outputs, each of which has a user, and one node that joins them."""
    g = Graph((n, 4))
    parts = g.node("Split", "x", g.constant([1] * n, TensorProto.INT64), axis=0, outputs=n)
    return g, g.node("Concat", *[g.node("Tanh", part) for part in parts], axis=0)


def constants(n):
    """n / 2 products with constants that begin alike."""
    g, v = Graph(), "x"
    for i in range(n // 2):
        v = g.node("Tanh", g.node("Mul", v, g.constant([1.0] * 7 + [1.0 + i])))
    return g, v


def attributes(n):
    """n / 2 nodes over one value that differ in a text or a float alone, added up."""
    g, v = Graph((1, 1, 2, 2)), None
    for i in range(n // 2):
        part = g.node("Elu", "x", alpha=1.0 + i)
        v = part if v is None else g.node("Add", v, part)
    return g, v


def inputs(n):
    """n / 2 parameters, added to one value."""
    g, v = Graph(), "x"
    for i in range(n // 2):
        v = g.node("Tanh", g.node("Mul", v, g.input(f"p{i}", (8,))))
    return g, v


def cell(n):
    """An LSTM cell written out, n / 12 steps: a product of the last state, a slice of the inputs, gates."""
    steps = max(1, n // 12)
    g = Graph((steps, 4, 16))
    w, axes, state, memory = g.input("w", (4, 16)), g.constant([0], TensorProto.INT64), None, None
    parts = g.constant([4, 4, 4, 4], TensorProto.INT64)
    flat = g.constant([4, 16], TensorProto.INT64)
    for t in range(steps):
        bounds = [g.constant([k], TensorProto.INT64) for k in (t, t + 1)]
        gates = g.node("Reshape", g.node("Slice", "x", *bounds, axes), flat)
        if state is not None:
            gates = g.node("Add", gates, g.node("MatMul", state, w))
        i, f, o, c = g.node("Split", gates, parts, axis=1, outputs=4)
        new = g.node("Mul", g.node("Sigmoid", i), g.node("Tanh", c))
        memory = new if memory is None else g.node("Add", g.node("Mul", g.node("Sigmoid", f), memory), new)
        state = g.node("Mul", g.node("Sigmoid", o), g.node("Tanh", memory))
    return g, state


def blocks(n):
    """Transformer blocks of one head and tiny width, n / 19 of them, with parameters of their own."""
    g, v = Graph((2, 6, 8)), "x"
    for i in range(max(1, n // 19)):
        p = {name: g.input(f"{name}{i}", (8, 8)) for name in ("q", "k", "v", "o", "u", "d")}
        scale, shift = g.input(f"s{i}", (8,)), g.input(f"t{i}", (8,))
        h = g.node("LayerNormalization", v, scale, shift, axis=-1)
        q, k, value = (g.node("MatMul", h, p[name]) for name in ("q", "k", "v"))
        scores = g.node("MatMul", q, g.node("Transpose", k, perm=[0, 2, 1]))
        h = g.node("MatMul", g.node("Softmax", scores, axis=-1), value)
        v = g.node("Add", v, g.node("MatMul", h, p["o"]))
        h = g.node("LayerNormalization", v, scale, shift, axis=-1)
        v = g.node("Add", v, g.node("MatMul", g.node("Relu", g.node("MatMul", h, p["u"])), p["d"]))
    return g, v


def dense(n):
    """A network whose layers see all layers before them (sqrt(n) layers: n edges)."""
    g = Graph((2, 1))
    found = ["x"]
    for _ in range(max(2, int(n**0.5))):
        joined = g.node("Concat", *found, axis=1) if len(found) > 1 else "x"
        found.append(g.node("ReduceSum", g.node("Tanh", joined), g.constant([1], TensorProto.INT64), keepdims=1))
    return g, found[-1]


def products(n):
    """n / 2 small products of one value, with weights of their own, added up."""
    g, v = Graph((512, 8)), None
    for i in range(max(1, n // 2)):
        part = g.node("MatMul", "x", g.input(f"w{i}", (8, 8)))
        v = part if v is None else g.node("Add", v, part)
    return g, v


def outputs(n):
    """n / 2 results."""
    g = Graph()
    return g, [g.node("Tanh", g.node("Mul", "x", g.constant([1.0 + i]))) for i in range(n // 2)]


def joined(n):
    """n / 4 values that are joined, go through one node, and are cut again."""
    g = Graph((1, 8))
    count, v = max(2, n // 4), None
    whole = g.node("Concat", *[g.node("LeakyRelu", "x", alpha=(i + 1) / n) for i in range(count)], axis=0)
    axes = g.constant([0], TensorProto.INT64)
    for i in range(count):
        bounds = [g.constant([k], TensorProto.INT64) for k in (i, i + 1)]
        part = g.node("Slice", whole, *bounds, axes)
        v = part if v is None else g.node("Mul", g.node("Add", v, part), part)
    return g, v


FAMILIES = {
    f.__name__: f
    for f in (chain, layers, slices, gathers, fan_out, repeated, operands, split, constants, attributes, inputs)
} | {f.__name__: f for f in (cell, blocks, dense, products, outputs, joined)}


# --- measuring --------------------------------------------------------------------------------------------------------

#: What is measured, in seconds of the process.
PHASES = ("read", "forward", "plan", "least", "text", "write", "run")
LEAST_MEMORY = 2  # a level of recomputation


class Watch:
    """Seconds of this process alone, phase by phase: the machine may be busy."""

    def __init__(self):
        self.seconds, self.last = {}, time.process_time()

    def lap(self, phase):
        now = time.process_time()
        self.seconds[phase] = now - self.last
        self.last = time.process_time()


def grown(before):
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def measure(family, size):
    """{phase: seconds, "bytes": how much the process has grown at its peak}. "forward" is a plan for inference, "plan"
    one with the gradient, "least" that with as much computed again as makes it smaller, "run" a step of "plan"."""
    import torch

    from ortmodule.engine.session import Session

    graph, result = FAMILIES[family](size)
    results = result if isinstance(result, list) else [result]
    data = graph.bytes(results)
    specs, needs = graph.specs, tuple(graph.needs)
    inputs = [torch.ones(shape, dtype=getattr(torch, kind)) for kind, shape in specs]
    del graph
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch = Watch()
    session = Session(data)
    watch.lap("read")
    session.model.plan(specs, tuple(False for _ in needs), None, 0)
    watch.lap("forward")
    plan = session.model.plan(specs, needs, tuple(True for _ in results), 0)
    watch.lap("plan")
    session.model.plan(specs, needs, tuple(True for _ in results), 0, (), None, False, -1, LEAST_MEMORY)
    watch.lap("least")
    plan.text()
    watch.lap("text")
    plan.onnx()
    watch.lap("write")
    peak = grown(before)
    step(torch, plan, inputs)
    watch.lap("run")
    return {**watch.seconds, "bytes": peak}


def step(torch, plan, inputs):
    """Forward and backward."""
    arena = torch.empty(plan.arena_bytes + 64, dtype=torch.uint8)
    arena = arena[-arena.data_ptr() % 64 :]
    outputs, grads = plan.empty_outputs(torch.Tensor), plan.empty_input_grads(torch.Tensor)
    plan.forward(arena, inputs, outputs, [], 0)
    dys = [spec and torch.ones(spec[1]) for spec in plan.output_grads]
    plan.backward(arena, inputs, outputs, dys, grads, 0)


def in_process(family, size, limit):
    """As ``measure``, in a process of its own; None when it takes longer than ``limit`` seconds of the processor."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--seconds", str(limit), "--one", family, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return None
    if done.returncode != 0:
        raise RuntimeError(f"{family} of size {size}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def total(figures):
    return sum(figures[phase] for phase in PHASES)


def sizes(most):
    size = FIRST
    while size < most:
        yield size
        size *= 2
    yield most


def run(family, most, seconds):
    """Rows (size, figures) of one family."""
    rows = []
    for size in sizes(most):
        found = in_process(family, size, seconds)
        if found is None:
            break
        rows.append((size, found))
        if total(found) > seconds / 4:
            break
    return rows


def per_doubling(rows, key):
    """The growth from the middle of a family's sizes to its end, for twice the size; None for too few."""
    if len(rows) < 3:
        return None
    (small, first), (large, last) = rows[len(rows) // 2 - 1], rows[-1]
    quotient = max(key(last), 1e-9) / max(key(first), 1e-9)
    return quotient ** (1 / _log2(large / small))


def _log2(x):
    import math

    return math.log2(x)


def table(found):
    head = ["family", "size", *(f"{phase}, s" for phase in PHASES), "memory, MB", "time, twice the size", "memory"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " ---: |" * (len(head) - 1)]
    for family, rows in found.items():
        if not rows:
            continue
        size, last = rows[-1]
        growth = [per_doubling(rows, key) for key in (total, lambda f: f["bytes"])]
        cells = [family, size, *(f"{last[phase]:.2f}" for phase in PHASES), f"{last['bytes'] / 1e6:.0f}"]
        lines.append("| " + " | ".join(map(str, [*cells, *("–" if x is None else f"{x:.2f}" for x in growth)])) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[[], *FAMILIES], metavar="FAMILY")
    parser.add_argument("--most", type=int, default=100_000, help="the largest size")
    parser.add_argument("--seconds", type=float, default=60, help="of the processor, the most for one size")
    parser.add_argument("--out", type=Path, help="the rows as FILE.json and FILE.md")
    parser.add_argument("--one", nargs=2, metavar=("FAMILY", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        resource.setrlimit(resource.RLIMIT_CPU, (int(args.seconds), int(args.seconds)))
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    found = {}
    for family in args.families or FAMILIES:
        found[family] = run(family, args.most, args.seconds)
        for size, figures in found[family]:
            seconds = "  ".join(f"{phase} {figures[phase]:.3f}" for phase in PHASES)
            print(f"{family:10} {size:7}  {seconds} s  {figures['bytes'] / 1e6:.1f} MB", flush=True)
    print(table(found))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(found, indent=1))
        args.out.with_suffix(".md").write_text(table(found) + "\n")


if __name__ == "__main__":
    main()
