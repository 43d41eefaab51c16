"""Measures training steps per model: PyTorch as it is against ORTModule, taking turns in one process.

    python -m benchmarks.train                          the usual rows
    python -m benchmarks.train --rows all               and those that take long
    python -m benchmarks.train --rows gpt2 minilm --steps 10 --out results/bench
    python -m benchmarks.train --device cuda --autocast bfloat16 --columns eager compile ortmodule --rows bert-large

Both sides get the same fresh batches, their models' default attention and dropout, and AdamW(fused=True); a step is
forward, backward and optimizer. The figures are medians; the spread is that of the middle half of the steps. The speed
is the median, with quartiles, of the first column's time over this one's in each turn. Peak memory is that of a
process of its own, above what it held before the first step: gradients and the optimizer's states, which that step
makes, are in it, the parameters are not. Written to <out>.json and <out>.md, with --plot to <out>.png. The slowest
later step shows what a new length costs in a row whose batches have lengths of their own. On a GPU the clock is read
when all work is done, so phases do not overlap there.

    python -m benchmarks.train --columns eager compile compile-dynamic ortmodule --losses 100 --plot
    python -m benchmarks.train --columns eager ort ortmodule --ort-python ../ort/bin/python

`compile` is torch.compile, which needs g++. `ort` is ONNX Runtime Training in an environment of its own.
"""

import argparse
import mmap
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
import transformers

from benchmarks.columns import COLUMNS, Column, Trainee, trainee_of
from benchmarks.losses import last_loss
from benchmarks.report import machine, markdown, middle, plot, speedup, write
from benchmarks.rows import EVERY, MORE, ROWS

TOUCHED, HUGE_PAGE = 3 << 30, 2 << 20  # bytes
PHASES = ("forward", "backward", "optimizer")


def touch_memory():
    """Writes to some free memory once, more than a first step takes: in small pages, as malloc has them, and huge ones.

    A virtual machine gets its pages from the host at the first touch, which takes seconds a gigabyte; the column that
    steps first would be charged for it. What was touched in small pages is not what a huge page is made of next.
    """
    size = min(TOUCHED, os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE // 4) // HUGE_PAGE * HUGE_PAGE or HUGE_PAGE
    with mmap.mmap(-1, size) as small, mmap.mmap(-1, size) as huge:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            huge.madvise(mmap.MADV_HUGEPAGE)
        for memory in (small, huge):
            for at in range(0, size, mmap.PAGESIZE):
                memory[at] = 1


def measure(key, columns, args):
    """{column: figures} of one row."""
    row = EVERY[key]
    torch.manual_seed(0)
    model = row.build().to(args.dtype).train()
    generator = torch.Generator().manual_seed(0)
    trainees = {name: trainee_of(name, key, model, args) for name in columns}
    first = {}
    for name, trainee in trainees.items():
        touch_memory()
        first[name] = sum(trainee.step(row.batch(generator)))

    steps, slowest = {name: [] for name in columns}, dict.fromkeys(columns, 0)
    for i in range(args.warmup + args.steps):
        batch = row.batch(generator)
        order = columns if i % 2 else columns[::-1]  # each goes first in every second turn
        for name in order:
            phases = trainees[name].step(batch)
            slowest[name] = max(slowest[name], sum(phases))
            if i >= args.warmup:
                steps[name].append(phases)

    new_shape = {name: [] for name in columns}
    for variation in range(1, args.new_shapes + 1):
        for name in columns:
            unknown, *known = (sum(trainees[name].step(row.batch(generator, variation))) for _ in range(4))
            new_shape[name].append(unknown - median(known))

    for trainee in trainees.values():
        trainee.close()
    losses = {name: last_loss(key, name, model, args, args.losses) for name in columns} if args.losses else {}
    batch = row.batch(generator)
    figures = {}
    for name in columns:
        step = middle([sum(phases) for phases in steps[name]])
        figures[name] = {
            "step": step,
            "phases": {
                phase: middle(times) for phase, times in zip(PHASES, zip(*steps[name], strict=True), strict=True)
            },
            "first_step": first[name],
            "first_minus_warm": first[name] - step["median"],
            "slowest_minus_warm": slowest[name] - step["median"],
            "new_shape": median(new_shape[name]) if new_shape[name] else None,
            "samples": len(next(iter(batch.values()))),
            "tokens": batch["input_ids"].numel() if "input_ids" in batch else None,
            "last_loss": losses.get(name),
        }
        whole = [[sum(phases) for phases in steps[column]] for column in (columns[0], name)]
        figures[name]["speedup"] = speedup(*whole)
    return figures


def status_bytes(key):
    """A figure of this process from /proc, in bytes: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_memory(name, column, args):
    """Bytes above the model: gradients and the optimizer's states count. Measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.train", "--rows", name, "--columns", column, "--peak-only"]
    command += ["--autocast", str(args.autocast).removeprefix("torch.")] if args.autocast else []
    command += ["--device", args.device, "--dtype", str(args.dtype).removeprefix("torch.")]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(name, column, args):
    """Three steps, at the end of which the peak is what every further step needs."""
    torch.manual_seed(0)
    row, generator = EVERY[name], torch.Generator().manual_seed(0)
    model = row.build().to(args.dtype).train()
    trainee = Trainee(Column(optimizer=COLUMNS[column].optimizer), model, args.autocast, args.device)
    before = status_bytes("VmRSS") if args.device == "cpu" else torch.cuda.memory_allocated()
    trainee.model = COLUMNS[column].wrap(trainee.model)
    for _ in range(3):
        trainee.step(row.batch(generator))
    print((status_bytes("VmHWM") if args.device == "cpu" else torch.cuda.max_memory_allocated()) - before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*EVERY, "all"], default=list(ROWS))
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=["eager", "ortmodule"])
    parser.add_argument("--steps", type=int, default=15, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps after the first that are not counted")
    parser.add_argument("--new-shapes", type=int, default=5, choices=range(8), help="sizes never seen before")
    parser.add_argument("--autocast", type=lambda name: getattr(torch, name), help="bfloat16, float16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32, help="of parameters")
    parser.add_argument("--losses", type=int, default=0, help="train so many steps more for the loss at their end")
    parser.add_argument("--ort-python", help="the Python of an environment with onnxruntime-training")
    parser.add_argument("--plot", action="store_true", help="draw a picture, too")
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--peak-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="results/train")
    args = parser.parse_args()
    args.rows = [*ROWS, *MORE] if "all" in args.rows else args.rows
    transformers.utils.logging.set_verbosity_error()
    if "ort" in args.columns and not args.ort_python:
        parser.error("the column ort needs --ort-python")
    if args.peak_only:
        return print_peak(args.rows[0], args.columns[0], args)

    report = {
        "machine": machine(args.device),
        "autocast": str(args.autocast),
        "dtype": str(args.dtype),
        "steps": args.steps,
        "rows": {},
    }
    for name in args.rows:
        figures = measure(name, args.columns, args)
        for column in args.columns:
            if not args.no_memory and column != "ort":
                figures[column]["peak_bytes"] = peak_memory(name, column, args)
        report["rows"][name] = figures
        print(*markdown({**report, "rows": {name: figures}}).splitlines()[-len(args.columns) :], sep="\n", flush=True)
        write(report, markdown(report), Path(args.out))
    if args.plot:
        plot(report, Path(args.out).with_suffix(".png"))
    print(markdown(report))


if __name__ == "__main__":
    main()
