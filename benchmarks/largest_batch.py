"""Finds the largest batch that trains within a limit of memory: eager, with checkpointing, and ORTModule.

    python -m benchmarks.largest_batch                                    BERT-large phase 1, GPT-2 medium; 12 GB
    python -m benchmarks.largest_batch --rows bert-large-phase-1 --limit 9e9 --out results/largest_batch
    python -m benchmarks.largest_batch --rows gpt2-medium --limit 13e9 --planned      as planned alone: no step runs

A step is forward, backward and ``AdamW(fused=True)``. Its bytes are the weights and the most that malloc and the engine
have given at once, each, since the model was made (tests/engine/counting_malloc.c), with what capture takes. Where
PyTorch reaches the limit is found by trying: batches are run until one fits and one more sample does not. ORTModule
finds its batch by `memory.largest_batch`, without a step, and trains it. Each run has a process of its own. Written to
<out>.json and <out>.md.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.memory import checkpointed, counting_malloc, wrapped
from benchmarks.report import machine, write
from benchmarks.rows import EVERY

ROWS = ("bert-large-phase-1", "gpt2-medium")
STATES = 2  # tensors as large as its parameter that AdamW keeps for each
SAMPLE = 4  # the batch of the sample that a plan is made for
TRIES = 8  # batches that are run at most
OF_TENSORS = 0.98  # of the limit: Python's own objects take the rest
STEPS = 2  # the first makes the optimizer's states, the last is timed


def budget_of(model, limit):
    """What the optimizer's states leave, and what capture takes."""
    return int(OF_TENSORS * limit) - STATES * sum(p.nbytes for p in model.parameters() if p.requires_grad)


def unlimited(model, limit):
    return wrapped(model, None)


def layers_again(model, limit):
    return wrapped(model, None, memory_opt_level=1)


def within_a_budget(model, limit):
    return wrapped(model, None, memory_budget=budget_of(model, limit))


#: (title, (model, limit) -> what is trained, does it plan its batch)
WAYS = {
    "eager": ("eager", lambda model, limit: model, False),
    "checkpointing": ("eager, checkpointing", lambda model, limit: checkpointed(model, None), False),
    "ortmodule": ("ORTModule", unlimited, True),
    "level-1": ("ORTModule, `MEMORY_OPT_LEVEL=1`", layers_again, True),
    "budget": ("ORTModule, `MEMORY_BUDGET`", within_a_budget, True),
}


# --- the process of one run -------------------------------------------------------------------------------------------


def run(row, way, limit, size):
    """{size, bytes, seconds}: of the last of some steps. ``size``: None: the largest that the plan allows."""
    from ortmodule import _core, memory

    torch.manual_seed(0)
    plain = EVERY[row].build().train()
    weights = sum(p.nbytes for p in plain.parameters())
    malloc = ctypes.CDLL(os.environ["LD_PRELOAD"])
    malloc.most_growth.restype = malloc.held.restype = ctypes.c_long
    malloc.most_growth()
    _core.memory_most()
    before = _core.memory()["used"]
    model = WAYS[way][1](plain, limit)
    batch_of = EVERY[row].sized
    search, captured, held = 0.0, 0, malloc.held()
    if size is None:
        start = time.perf_counter()
        sample = batch_of(SAMPLE)(torch.Generator().manual_seed(1))
        memory.predict(model, **sample)
        limit -= (captured := malloc.held() - held)  # no tensors
        malloc.most_growth()
        size = memory.largest_batch(model, sample, budget=limit, optimizer="adamw")
        search = time.perf_counter() - start
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = batch_of(size)(torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
    most = weights + captured + malloc.most_growth() + _core.memory_most() - before
    return {"size": size, "bytes": most, "seconds": seconds, "search": search}


def planned(row, way, limit):
    """{size, bytes, extra, search}: the largest batch by its plan, and what its step takes; no tensor has memory."""
    from ortmodule import memory

    with torch.device("meta"):
        model = WAYS[way][1](EVERY[row].build().train(), limit)
    batch_of, start = EVERY[row].sized, time.perf_counter()
    sample = batch_of(SAMPLE)(torch.Generator().manual_seed(1))
    size = memory.largest_batch(model, sample, budget=limit, optimizer="adamw")
    search = time.perf_counter() - start
    peak = memory.predict(model, **batch_of(size)(torch.Generator().manual_seed(1)), optimizer="adamw")
    return {"size": size, "bytes": peak.total, "extra": peak.extra_work, "search": search}


def measured(row, way, limit, size, library):
    """`run` in a process of its own; its reason where it fails."""
    command = [sys.executable, "-m", "benchmarks.largest_batch", "--run", row, way, str(limit), str(size or 0)]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": str(library)})
    lines = found.stdout.splitlines() or [""]
    if found.returncode or not lines[-1].startswith("{"):
        return {"failed": (found.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
    return json.loads(lines[-1])


# --- the table --------------------------------------------------------------------------------------------------------


def largest_of_pytorch(row, way, limit, library):
    """The largest batch within the limit, and the bytes of one more sample: by trying."""
    runs: dict[int, dict] = {}
    size = 1
    while len(runs) < TRIES:
        runs[size] = of = measured(row, way, limit, size, library)
        if "failed" in of and len(runs) == 1:
            return of
        of.setdefault("bytes", math.inf)  # the machine has not as much
        fits = max((each for each in runs if runs[each]["bytes"] <= limit), default=0)
        if fits + 1 in runs:
            more = runs[fits + 1]["bytes"]
            return {**runs[fits], "more": more} if fits else {"failed": f"one sample takes {more / 1e9:.2f} GB"}
        size = next_try(runs, limit, fits)
    return {"failed": f"not found in {TRIES} runs"}


def next_try(runs, limit, fits):
    """Between the largest batch that ``fits`` and the least that does not: where the line through the two largest ones
    meets the limit. Small batches do not count: their peak is at the optimizer's step."""
    over = min((size for size in runs if size > fits), default=None)
    known = sorted(size for size in runs if runs[size]["bytes"] < math.inf)[-2:]
    if len(known) < 2 or runs[known[1]]["bytes"] <= 1.01 * runs[known[0]]["bytes"]:
        return 2 * fits if over is None else (fits + over) // 2
    (few, many), slope = known, runs[known[1]]["bytes"] - runs[known[0]]["bytes"]
    wish = few + int((limit - runs[few]["bytes"]) * (many - few) / slope)
    wish = wish + 1 if wish == fits else wish
    return max(wish, fits + 1) if over is None else min(max(wish, fits + 1), over - 1)


def table(row, limit, found):
    lines = [f"### {EVERY[row].title}, {limit / 1e9:g} GB", ""]
    lines.append("| way | largest batch | times eager's | GB of its step | one more sample: GB | samples a second |")
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    first = found.get("eager", {}).get("size")
    for way, of in found.items():
        if "failed" in of:
            lines.append(f"| {WAYS[way][0]} | {of['failed']} | | | | |")
            continue
        times = f"{of['size'] / first:.2f}" if first else "–"
        more = f"{of['more'] / 1e9:.2f}" if of.get("more", math.inf) < math.inf else "–"
        speed = of["size"] / of["seconds"]
        lines.append(f"| {WAYS[way][0]} | {of['size']} | {times} | {of['bytes'] / 1e9:.2f} | {more} | {speed:.2f} |")
    return [*lines, ""]


def table_of_plans(row, limit, found):
    lines = [f"### {EVERY[row].title}, {limit / 1e9:g} GB, planned", ""]
    lines.append("| way | largest batch | GB of its step | work done twice | seconds of the search, capture included |")
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for way, of in found.items():
        share = f"{100 * of['extra']:.0f} %"
        lines.append(f"| {WAYS[way][0]} | {of['size']} | {of['bytes'] / 1e9:.2f} | {share} | {of['search']:.0f} |")
    return [*lines, ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, row in EVERY.items() if row.sized]
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=sorted(known), metavar="ROW")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--limit", type=float, default=12e9, help="bytes")
    parser.add_argument("--out", type=Path, default=Path("results/largest_batch"))
    parser.add_argument("--planned", action="store_true", help="ORTModule's batches, by their plans alone")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        row, way, limit, size = args.run
        print(json.dumps(run(row, way, int(limit), int(size) or None)))
        return
    found, lines, limit = {}, [], int(args.limit)
    if args.planned:
        for row in args.rows:
            found[row] = {way: planned(row, way, limit) for way in args.ways if WAYS[way][2]}
            lines += table_of_plans(row, limit, found[row])
            print(*lines[-len(found[row]) - 5 :], sep="\n", flush=True)
        write({"machine": machine(), "limit": limit, "rows": found}, "\n".join(lines), args.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        library = counting_malloc(folder)
        for row in args.rows:
            found[row] = {}
            for way in args.ways:
                plans = WAYS[way][2]
                of = measured(row, way, limit, None, library) if plans else largest_of_pytorch(row, way, limit, library)
                found[row][way] = of
                print(row, way, of, flush=True)
            lines += table(row, limit, found[row])
            write({"machine": machine(), "limit": limit, "rows": found}, "\n".join(lines), args.out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
