"""Training steps per model: PyTorch as it is against ORTModule, taking turns in one process.

    python -m benchmarks.train                          the usual rows
    python -m benchmarks.train --rows all               and those that take long
    python -m benchmarks.train --rows gpt2 minilm --steps 10 --out results/bench
    python -m benchmarks.train --device cuda --autocast bfloat16 --columns eager compile ortmodule --rows bert-large

Both sides get the same fresh batches, their models' default attention and dropout, and AdamW(fused=True); a step is
forward, backward and optimizer. The figures are medians; the spread is that of the middle half of the steps. Peak
memory is that of a process of its own, above what it held before the first step. Written to <out>.json and <out>.md.
On a GPU the clock is read when all work is done, so phases do not overlap there.
"""

import argparse
import copy
import json
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

import torch
import transformers

from benchmarks.rows import EVERY, MORE, ROWS

TOUCHED = 3 << 30  # bytes
PHASES = ("forward", "backward", "optimizer")


# --- columns ----------------------------------------------------------------------------------------------------------


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def ortmodule(model):
    from ortmodule import ORTModule

    return ORTModule(model)


@dataclass(frozen=True)
class Column:
    wrap: Callable = lambda model: model
    optimizer: Callable = adamw


#: The first column given on the command line is what the others are compared with.
COLUMNS = {
    "eager": Column(),
    "ortmodule": Column(ortmodule),
    "compile": Column(torch.compile),
    "compile-max": Column(partial(torch.compile, mode="max-autotune")),
}


class Trainee:
    """One column's copy of the model."""

    def __init__(self, column, model, autocast=None, device="cpu"):
        self.model = column.wrap(copy.deepcopy(model).to(device))
        self.optimizer = column.optimizer(self.model.parameters())
        self.autocast, self.device = autocast, device

    def now(self):
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, batch):
        """Seconds of each phase."""
        batch = {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        marks = [self.now()]
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            outputs = self.model(**batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        del outputs
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.now())
        return [b - a for a, b in zip(marks, marks[1:], strict=False)]


# --- measuring --------------------------------------------------------------------------------------------------------


def middle(values):
    """Median and the middle half."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "low": low, "high": high}


def touch_memory():
    """Writes to some free memory once, more than a first step takes.

    A virtual machine gets its pages from the host at the first touch, which takes seconds a gigabyte; whoever happened
    to step first would be charged for it.
    """
    pages = min(TOUCHED // mmap.PAGESIZE, os.sysconf("SC_AVPHYS_PAGES") // 2)
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        for i in range(pages):
            memory[i * mmap.PAGESIZE] = 1


def measure(row, columns, args):
    """{column: figures} of one row."""
    torch.manual_seed(0)
    model = row.build().to(args.dtype).train()
    generator = torch.Generator().manual_seed(0)
    trainees = {name: Trainee(COLUMNS[name], model, args.autocast, args.device) for name in columns}
    first = {}
    for name, trainee in trainees.items():
        touch_memory()
        first[name] = sum(trainee.step(row.batch(generator)))

    steps = {name: [] for name in columns}
    for i in range(args.warmup + args.steps):
        batch = row.batch(generator)
        order = columns if i % 2 else columns[::-1]  # nobody always goes first
        for name in order:
            phases = trainees[name].step(batch)
            if i >= args.warmup:
                steps[name].append(phases)

    new_shape = {name: [] for name in columns}
    for variation in range(1, args.new_shapes + 1):
        for name in columns:
            unknown, *known = (sum(trainees[name].step(row.batch(generator, variation))) for _ in range(4))
            new_shape[name].append(unknown - median(known))

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
            "new_shape": median(new_shape[name]) if new_shape[name] else None,
        }
        base = [sum(phases) for phases in steps[columns[0]]]
        figures[name]["speedup"] = middle([b / sum(phases) for b, phases in zip(base, steps[name], strict=True)])
        figures[name]["speedup"]["median"] = median(base) / step["median"]
    return figures


def status_bytes(key):
    """A figure of this process from /proc, in bytes: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_memory(name, column, args):
    """Bytes above the model and its optimizer, measured in a process of its own."""
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


# --- reporting --------------------------------------------------------------------------------------------------------


def gpu():
    """Device, driver and clocks, as nvidia-smi knows them."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,memory.total,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    values = found[0].split(", ") if found else []
    return {"device": torch.cuda.get_device_name(), **dict(zip(fields.split(","), values, strict=False))}


def machine(device="cpu"):
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = {name: version(name) for name in ("torch", "transformers", "ortmodule")}
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        **packages,
        **({"cuda": torch.version.cuda, **gpu()} if device != "cpu" else {}),
    }


def milliseconds(figure):
    half = (figure["high"] - figure["low"]) / 2
    return f"{1e3 * figure['median']:.0f} ±{1e3 * half:.0f}"


def markdown(report):
    """A table: a row each, and for every column step, speed-up, first step, new shape, peak."""
    about = report["machine"]
    lines = [
        f"{about['cpu']}, {about['threads']} threads; " + ", ".join(f"{k} {about[k]}" for k in list(about)[3:]),
        "",
        "| model | backend | step, ms | speed | first step, s | first − warm, s | new shape, ms | peak, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, columns in report["rows"].items():
        for column, figures in columns.items():
            speed, new, peak = figures["speedup"], figures["new_shape"], figures.get("peak_bytes")
            cells = [
                EVERY[name].title,
                column,
                milliseconds(figures["step"]),
                f"{speed['median']:.2f}× ({speed['low']:.2f}–{speed['high']:.2f})",
                f"{figures['first_step']:.2f}",
                f"{figures['first_minus_warm']:.2f}",
                "–" if new is None else f"{1e3 * new:.0f}",
                "–" if peak is None else f"{peak / 1e6:.0f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(report, table, out):
    """<out>.json and <out>.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1))
    out.with_suffix(".md").write_text(table)


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
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--peak-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="results/train")
    args = parser.parse_args()
    args.rows = [*ROWS, *MORE] if "all" in args.rows else args.rows
    transformers.utils.logging.set_verbosity_error()
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
        figures = measure(EVERY[name], args.columns, args)
        for column in args.columns:
            if not args.no_memory:
                figures[column]["peak_bytes"] = peak_memory(name, column, args)
        report["rows"][name] = figures
        print(*markdown({**report, "rows": {name: figures}}).splitlines()[-len(args.columns) :], sep="\n", flush=True)
        write(report, markdown(report), Path(args.out))
    print(markdown(report))


if __name__ == "__main__":
    main()
