"""Compares what is predicted of a step's memory with what its process takes, for each benchmark row, in both types.

    python -m benchmarks.predicted                             the rows of docs/benchmarks.md, float32 and bfloat16
    python -m benchmarks.predicted --rows gpt2 resnet-50 --types float32 --out results/predicted

Each row has a process of its own. `memory.predict` is asked before any step, and again behind some steps, when logits
that the script does not read wait for their memory's sake. Then one more step (forward, backward, gradients made anew)
is counted: the arena in whole pages, as the engine's blocks have grown behind forward, less forward's results; and all
that the process has grown by at most, at malloc (tests/engine/counting_malloc.c) and in the engine, which is predicted
as gradients, activations, workspace, results and what torch's convolutions take. Memory of earlier steps is not kept: a
block may have been larger then (`KEEP_MEMORY`). Written to <out>.json and <out>.md.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.alive import TEN
from benchmarks.memory import Steps, counting_malloc
from benchmarks.report import machine, write
from benchmarks.rows import EVERY

TYPES = {"float32": None, "bfloat16": "bfloat16"}
STEPS = 4  # before the one that counts: the first makes the plan, from the third on logits may wait
HEADER, PAGE, LARGE = 64, 4096, 1 << 20  # of the engine's blocks (csrc/core/memory.c): smaller ones are malloc's
TOP = """| model | type | arena: predicted | taken | process: predicted | taken | by predicted | before any step |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def growth(peak):
    """Bytes of a step beside the module and its inputs."""
    return peak.total - peak.parameters - peak.inputs - peak.optimizer


def predicted(steps):
    from ortmodule import memory

    with steps.cast():
        return memory.predict(steps.model, **steps.batch)


def one_step(steps):
    """(bytes of the engine's blocks behind forward, with its results; bytes that the process has grown by at most) of a
    step that holds what forward returns until backward is over."""
    from ortmodule import _core

    most_growth = ctypes.CDLL(os.environ["LD_PRELOAD"]).most_growth
    most_growth.restype = ctypes.c_long
    steps.model.zero_grad()
    gc.collect()
    most_growth()
    _core.memory_most()
    before = _core.memory()["used"]
    with steps.cast():
        outputs = steps.model(**steps.batch)
    held = _core.memory()["used"] - before
    (outputs if isinstance(outputs, torch.Tensor) else outputs.loss).backward()
    return held, most_growth() + _core.memory_most() - before


def as_a_block(count):
    """What a block of so many bytes takes: whole pages."""
    return (count + HEADER + PAGE - 1) // PAGE * PAGE


def results(peak):
    """Bytes of the blocks that large results have."""
    return sum(as_a_block(t.bytes) for t in peak.tensors if t.kind == "output" and t.bytes >= LARGE)


def run(row, kind):
    """{what: bytes} of one row."""
    steps = Steps(row, "ortmodule", TYPES[kind])
    first = growth(predicted(steps))
    for _ in range(STEPS):
        one_step(steps)
    peak = predicted(steps)
    held, grown = one_step(steps)
    return {
        "first": first,
        "arena": {"predicted": as_a_block(peak.block), "taken": held - results(peak)},
        "process": {"predicted": growth(peak), "taken": grown},
    }


def measured(row, kind, library):
    """:func:`run` in a process with the preloaded malloc, or why there is nothing."""
    command = [sys.executable, "-m", "benchmarks.predicted", "--run", row, kind]
    environment = {**os.environ, "LD_PRELOAD": str(library), "ORTMODULE_KEEP_MEMORY": "0"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = found.stdout.splitlines() or [""]
    if found.returncode or not lines[-1].startswith("{"):
        return {"failed": (found.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
    return json.loads(lines[-1])


def line(row, kind, found):
    if "failed" in found:
        return f"| {EVERY[row].title} | {kind} | {found['failed']} | | | | | |"
    arena, process = found["arena"], found["process"]
    cells = [*arena.values(), *process.values()]
    ratio = process["taken"] / process["predicted"]
    sizes = " | ".join(f"{count / 1e6:,.1f}" for count in cells)
    return f"| {EVERY[row].title} | {kind} | {sizes} | {ratio:.3f} | {found['first'] / 1e6:,.1f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(TEN), choices=list(EVERY), metavar="ROW")
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=list(TYPES))
    parser.add_argument("--out", type=Path, default=Path("results/predicted"))
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(run(*args.run)))
        return
    found, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        library = counting_malloc(folder)
        for row in args.rows:
            for kind in args.types:
                found[f"{row} {kind}"] = measured(row, kind, library)
                lines.append(line(row, kind, found[f"{row} {kind}"]))
                print(lines[-1], flush=True)
                write({"machine": machine(), "rows": found}, TOP + "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
