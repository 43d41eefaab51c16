"""Writes what a step of each benchmark row holds: its arena and the bound, peaks under budgets.

    python -m benchmarks.alive                               the rows of docs/benchmarks.md
    python -m benchmarks.alive --rows gpt2 resnet-18 --out results/alive.md

No step runs: each row is planned on the meta device, in float32 and with bfloat16 autocast. Layers that are alike are
one line, with * for their numbers. Parameters, gradients of parameters and the optimizer's states are apart. The row of
WordNet's glosses needs what examples/finetune_text_classifier needs.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.rows import EVERY
from ortmodule import memory
from ortmodule.debug.memory.peak import in_units
from ortmodule.engine.memory_goal import ALL_AGAIN, MemoryGoal

#: Those of the tables of docs/benchmarks.md.
TEN = (
    "minilm", "minilm-glosses", "bert-base", "gpt2", "gpt2-long", "llama-100m", "t5-small", "vit-small-32",
    "transformer", "resnet-50",
)  # fmt: skip
POINTS = 9  # budgets, at equal distances
MOST = 8  # lines of a table
WRITTEN = "as written"  # an order
TOP = """# What a step holds, as planned

`python -m benchmarks.alive --out docs/benchmarks-memory.md` makes this page, and `print(ortmodule.memory.predict(model,
...))` shows the same of your own step ([memory](how-to-memory.md)). No step runs. Settings are the defaults.

"""
ARENAS = """## The arena and its bound

Forward and backward run in one block of memory, the arena, in which large gradients are, too, where that takes less.
*Alive* are the most bytes of it that are needed at one time: no placement of these values takes less. What forward
returns, and the gradients that backward is given for it, have memory of their own.

| model | type | arena | alive | arena by alive | results |
| --- | --- | ---: | ---: | ---: | ---: |
"""
ORDERS = """## Orders of execution

The most bytes alive at one time before blocks have places: as the graph is written, and how many times as many other
orders of execution need. One that takes a thirty-second less, placed, too, is run ([memory](architecture/memory.md)).

"""
BUDGETS = """## Budgets

The peak of a step under budgets at equal distances, without the optimizer's states, in MiB; in brackets by how much
more work. The first budget is what a step takes that keeps all, the last the least that can be reached
(`MEMORY_OPT_LEVEL=2`).
"""
TABLES = """## What is alive at the peak

By module path and kind. On the CPU large gradients take the place of activations that backward is done with, so a
peak lies where backward begins, with the logits' gradient and all that forward keeps, or near its end, where nearly
all gradients are there and few activations. What backward computes again is not kept, and so in no table
([recomputation](architecture/recomputation.md)).

"""
IN_ARENA = ("activation", "workspace", "gaps")


def step_of(key, autocast):
    """A step of this row, captured, to be planned."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = EVERY[key].build().train()
    batch = EVERY[key].batch(torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return memory.PredictedStep(model, ((), batch), "adamw")


def order_lines(found):
    """A table of [(key, autocast, `Plan.orders`)]."""
    others = [name for name in found[0][2] if name != WRITTEN]
    lines = [
        f"| model | type | {WRITTEN} | {' | '.join(others)} |",
        f"| --- | --- |{' ---: |' * (1 + len(others))}",
    ]
    for key, autocast, peaks in found:
        times = " | ".join(f"{peaks[name] / peaks[WRITTEN]:.3f}" for name in others)
        lines.append(f"| {EVERY[key].title} | {kind_of(autocast)} | {in_units(peaks[WRITTEN])} | {times} |")
    return lines


def kind_of(autocast):
    return "bfloat16 autocast" if autocast else "float32"


def arena_line(key, autocast, peak):
    sizes = (in_units(peak.block), in_units(peak.alive), f"{peak.block / peak.alive:.3f}", in_units(peak.outputs))
    return f"| {' | '.join((EVERY[key].title, kind_of(autocast), *sizes))} |"


# --- budgets ----------------------------------------------------------------------------------------------------------


def under_budgets(step, points=POINTS):
    """[(budget, peak without the optimizer's states, extra work)], the largest budget first, of a
    `memory.PredictedStep`. RuntimeError where a peak is above its budget, or above that of a larger one."""
    everything, least = step.peak(MemoryGoal(0, 1 << 62)), step.peak(MemoryGoal(ALL_AGAIN, 0))
    most, fewest = (peak.total - peak.optimizer for peak in (everything, least))
    found = []
    for i in range(points):
        budget = most + (fewest - most) * i // (points - 1)
        peak = step.peak(MemoryGoal(0, budget))
        found.append((budget, peak.total - peak.optimizer, peak.extra_work))
        if found[-1][1] > min(budget, *(one[1] for one in found)):
            raise RuntimeError(f"a peak above its budget, or above that of a larger budget: {found}")
    return found


def budget_lines(key, autocast, found):
    mib = 1 << 20
    peaks = " | ".join(f"{peak / mib:.1f} ({100 * work:.0f} %)" for _, peak, work in found)
    limits = " | ".join(f"{budget / mib:.1f}" for budget, *_ in found)
    return f"| {EVERY[key].title}, {kind_of(autocast)} | budget | {limits} |\n| | peak | {peaks} |"


def budget_table(lines, points=POINTS):
    head = f"\n| model | |{' |' * points}\n| --- | --- |{' ---: |' * points}\n"
    end = "\n\nNo peak is above its budget, and none above that of a larger budget: else there would be no table.\n\n"
    return BUDGETS + head + "\n".join(lines) + end


# --- what is alive ----------------------------------------------------------------------------------------------------


def why(tensor):
    if tensor.kind == "gaps":
        return "between blocks"
    if tensor.kind == "workspace":
        return "scratch memory of the kernel that runs"
    return "a gradient on its way" if tensor.name.startswith("gradient at") else "forward made it, backward reads it"


def lines_of(peak):
    """(bytes, tensors, module path, what, type and shape, why) of what is in the arena, the most first."""
    sums, counts = defaultdict(int), defaultdict(int)
    for tensor in peak.tensors:
        if tensor.kind in IN_ARENA:
            path = re.sub(r"(?<=\.)\d+|^\d+", "*", tensor.module)
            spec = f"{tensor.dtype}{list(tensor.shape)}" if tensor.dtype else ""
            key = path, tensor.name.removeprefix("gradient at "), spec, why(tensor)
            sums[key] += tensor.bytes
            counts[key] += 1
    return sorted(((count, counts[key], *key) for key, count in sums.items()), key=lambda line: -line[0])


def section(key, autocast, peak):
    parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
    split = ", ".join(f"{part} {in_units(getattr(peak, part))}" for part in parts)
    found = lines_of(peak)
    rows = [f"| {in_units(size)} | {100 * size / peak.arena:.0f} % | {n} | {path or '–'} | {what} | {spec} | {reason} |"
            for size, n, path, what, spec, reason in found[:MOST]]  # fmt: skip
    rest = sum(line[0] for line in found[MOST:])
    rows += (
        [f"| {in_units(rest)} | {100 * rest / peak.arena:.0f} % | {len(found) - MOST} lines | | | | |"] if rest else []
    )
    head = "| bytes | of the arena | tensors | module | operator | each | why |\n|---:|---:|---:|---|---|---|---|"
    return f"### {EVERY[key].title}, {kind_of(autocast)}\n\n{split}.\n\n{head}\n" + "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(TEN), choices=list(EVERY), metavar="ROW")
    parser.add_argument("--points", type=int, default=POINTS, help="budgets that are planned; 0: none")
    parser.add_argument("--out", type=Path, help="a file for the page; otherwise it is printed")
    args = parser.parse_args()
    arenas, orders, budgets, tables = [], [], [], []
    for key in args.rows:
        for autocast in (False, True):
            step = step_of(key, autocast)
            peak = step.peak()
            orders.append((key, autocast, step.plan().orders))
            arenas.append(arena_line(key, autocast, peak))
            print(arenas[-1], flush=True)
            tables.append(section(key, autocast, peak))
            if args.points:
                budgets.append(budget_lines(key, autocast, under_budgets(step, args.points)))
    page = TOP + ARENAS + "\n".join(arenas) + "\n\n" + ORDERS + "\n".join(order_lines(orders)) + "\n\n"
    page += (budget_table(budgets, args.points) if budgets else "") + TABLES + "\n".join(tables)
    if args.out:
        args.out.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
