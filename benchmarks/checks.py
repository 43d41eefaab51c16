"""Measures how much of a training step the checks of memory are that Python can change.

    python -m benchmarks.checks [ROW...] [--steps 5] [--autocast bfloat16]        the usual: bert-base gpt2 resnet-18

A build without the checks does not exist. So what was added is measured alone, and multiplied by how often it runs in
a step of the row, as its plans say:

    storages    each tensor that forward or backward is given is asked where its storage is and how large: measured over
                the model's own parameters, from Python, which is slower than the engine asking
    indices     each label and index is compared with a size in each kernel that uses it: measured is a Gather of rows
                of one number, on one thread, which moves the number, too

Both are more than the checks alone, so the share is at most what is printed. The step is the median of a few, with
AdamW(fused=True), as benchmarks.train has it.
"""

import argparse
import re
import time
from collections import Counter
from statistics import median

import torch
from onnx import TensorProto, helper

from benchmarks.columns import COLUMNS, Trainee
from benchmarks.report import machine
from benchmarks.rows import EVERY
from ortmodule import _core
from ortmodule.engine.session import Session

USUAL = ("bert-base", "gpt2", "resnet-18")
#: "%7, %8 = Gather(%1 weight, %3 ids, axis=0) float32[8, 128, 768], ..." and "input %1 weight float32[...]"
NODE = re.compile(r"^((?:%\d+(?:, )?)+) = (\w+)\((.*)\) (.*)$")
INPUT = re.compile(r"^input %(\d+) .*?(\w+)\[([\d, ]*)\]")
SHAPE = re.compile(r"\w+\[([\d, ]*)\]")


def elements(sizes):
    count = 1
    for size in sizes.split(","):
        count *= int(size) if size.strip() else 1
    return count


def operands(text):
    """ "%1 weight, [0, 4], -, axis=0" in parts."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def index_counts(text):
    """{operator: indices that its kernels check in a step}, of a plan as text."""
    checked = {row["name"]: row["checked"] for row in _core.operators() if row["has_kernel"]}
    count_of, found = {}, Counter()
    for line in text.splitlines():
        line = line.strip()
        if given := INPUT.match(line):
            count_of[given[1]] = elements(given[3])
        if not (node := NODE.match(line)):
            continue
        results, name, inside, shapes = node.groups()
        for number, sizes in zip(re.findall(r"%(\d+)", results), SHAPE.findall(shapes), strict=False):
            count_of[number] = elements(sizes)
        for place, operand in enumerate(operands(inside)):
            if operand.startswith("%") and checked.get(name, 0) >> min(place, 31) & 1:
                number = operand[1:].split()[0]
                found[name] += count_of[number]
    return found


def storage_count(plan):
    """Tensors of the caller's that forward and backward are given."""
    given = len(plan.input_grads)
    return given + sum(plan.reads_input) + sum(plan.reads_output) + sum(spec is not None for spec in plan.output_grads)


def best(function, count, repeats=20):
    """Seconds of one of ``count`` in it."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        found.append((time.perf_counter() - start) / count)
    return min(found)


def seconds_of_storage(tensors):
    def ask():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storage.data_ptr(), storage.nbytes()

    return best(ask, len(tensors))


def seconds_of_index(count=1 << 16):
    of = helper.make_tensor_value_info
    given = [of("x", TensorProto.FLOAT, [None, None]), of("i", TensorProto.INT64, [None])]
    node = helper.make_node("Gather", ["x", "i"], ["y"], axis=0)
    graph = helper.make_graph([node], "checks", given, [of("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x, i = torch.ones(2, 1), torch.zeros(count, dtype=torch.int64)
    plan = Session(model.SerializeToString()).plan([("float32", (2, 1)), ("int64", (count,))], [False, False], None)
    outputs, arena = plan.empty_outputs(torch.Tensor), torch.empty(0, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return best(lambda: plan.forward(arena, [x, i], outputs, [], 0), count)
    finally:
        torch.set_num_threads(threads)


def plans_of(model):
    graphs = [graph for variants in model._ortmodule.graphs.values() for graph in variants]
    return [executable.plan for graph in graphs for executable in graph.plans.values()]


def measure(key, steps, autocast):
    row = EVERY[key]
    torch.manual_seed(0)
    trainee = Trainee(COLUMNS["ortmodule"], row.build().train(), autocast)
    generator = torch.Generator().manual_seed(0)
    batch = row.batch(generator)
    trainee.step(batch)
    step = median(sum(trainee.step(batch)) for _ in range(steps))
    parameters = [*trainee.model.parameters(), *trainee.model.buffers()]
    indices, storages = Counter(), 0
    for plan in plans_of(trainee.model):  # a step of padded sequences runs two: one counts tokens
        indices.update(index_counts(plan.text()))
        storages += storage_count(plan)
    return {
        "step": step,
        "storages": storages,
        "storage": seconds_of_storage(parameters),
        "indices": indices,
        "index": seconds_of_index(),
    }


def line(key, found):
    storages = found["storages"] * found["storage"]
    counted = sum(found["indices"].values())
    indices = counted * found["index"]
    cells = [
        EVERY[key].title,
        f"{found['step'] * 1e3:.1f}",
        f"{found['storages']} × {found['storage'] * 1e9:.0f} ns",
        f"{counted} × {found['index'] * 1e9:.2f} ns",
        f"{(storages + indices) * 1e6:.1f}",
        f"{(storages + indices) / found['step'] * 100:.4f}",
    ]
    return f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=USUAL, metavar="ROW", help=f"of {', '.join(EVERY)}")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--autocast", choices=["bfloat16", "float16"])
    args = parser.parse_args()
    print(", ".join(f"{name} {found}" for name, found in machine().items()), flush=True)
    print("| model | step, ms | storages | indices | both, µs | at most, % of a step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for key in args.rows:
        found = measure(key, args.steps, args.autocast and getattr(torch, args.autocast))
        print(line(key, found), flush=True)
        for name, count in sorted(found["indices"].items()):
            print(f"|   {name} | | | {count} | | |", flush=True)


if __name__ == "__main__":
    main()
