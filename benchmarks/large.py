"""Measures a training step of one large model on a GPU, by one column after the other.

    python -m benchmarks.large bert-large --autocast bfloat16 --fill 0.6 --out results/bert-large

Every column gets the same weights, batches and optimizer; what it has measured is kept in the folder <out>, so that
another call goes on with the next column. --fill looks first for the number of samples with which eager PyTorch needs
that share of the GPU's memory. Nothing waits between the phases of a step; steps are timed by events of the GPU. How
long it works of a step is what a trace of further steps says. Peak memory is all that torch has allocated, weights and
optimizer included. A column that fails is in the table with its reason. Written to <out>.json and <out>.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks.columns import COLUMNS
from benchmarks.report import machine, middle, milliseconds, write
from benchmarks.rows import EVERY
from benchmarks.train import status_bytes

BATCHES = 8  # again and again; each is seen once before anything is measured
TRACED = 3  # steps
MULTIPLE = 8  # of a number of samples that is looked for
MOST_KERNELS, MOST_NAME = 40, 160  # in a list of what takes longest; characters of a name


def peak(device):
    return status_bytes("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()


def finished(device):
    if device != "cpu":
        torch.cuda.synchronize()


class Loop:
    """A model with its optimizer."""

    def __init__(self, row, args):
        torch.manual_seed(0)
        self.model = row.build().to(args.device, args.dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.autocast, self.device = args.autocast, args.device

    def batch(self, make, generator):
        """In the type of the parameters, as a pure 16-bit model takes images."""
        dtype = next(self.model.parameters()).dtype
        return {
            name: x.to(self.device, dtype if x.is_floating_point() else None) for name, x in make(generator).items()
        }

    def step(self, batch):
        """The loss, which a later step may overwrite. Nothing waits."""
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


# --- in a process of its own ------------------------------------------------------------------------------------------


def samples_that_fit(points, limit):
    """The number of samples that need at most ``limit`` bytes, by two points (samples, bytes) of a line."""
    (n0, b0), (n1, b1) = points
    each = max((b1 - b0) / (n1 - n0), 1)
    found = int((limit - b0) / each + n0)
    return max(1, found if found < 2 * MULTIPLE else found // MULTIPLE * MULTIPLE)


def look_for_batch(row, args):
    loop, generator, points = Loop(row, args), torch.Generator().manual_seed(0), []
    for count in (args.batch, 2 * args.batch):
        for again in (False, True):  # the first step makes the optimizer's state
            if again and args.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            loop.step(loop.batch(row.sized(count), generator))
            finished(args.device)
        points.append((count, peak(args.device)))
    limit = args.fill * (args.memory or torch.cuda.get_device_properties(0).total_memory)
    return {"batch": samples_that_fit(points, limit), "points": points, "limit": limit}


def share_of_time(spans):
    """How much of the time from the first to the last of these (start, end) at least one of them covers."""
    covered, until = 0, None
    for start, end in sorted(spans):
        covered += max(0, end - (start if until is None else max(start, until)))
        until = end if until is None else max(until, end)
    return covered / (until - min(start for start, _ in spans)) if spans else None


def kernels_of(events, steps, most=MOST_KERNELS):
    """What of ``events`` (name, start, end in microseconds) takes longest: [name, how often a step, seconds a step]."""
    times = defaultdict(list)
    for name, start, end in events:
        times[name[:MOST_NAME]].append(end - start)
    longest = sorted(times.items(), key=lambda each: -sum(each[1]))[:most]
    return [[name, len(each) / steps, sum(each) / steps / 1e6] for name, each in longest]


def traced(device, step, steps=TRACED, most=MOST_KERNELS):
    """Of ``step(i)`` on a GPU: the share of time in which it works, and :func:`kernels_of`. (None, []) on a CPU."""
    if device == "cpu":
        return None, []
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in range(steps):
            step(i)
        finished(device)
    found = [e for e in trace.events() if e.device_type == DeviceType.CUDA]
    events = [(e.name, e.time_range.start, e.time_range.end) for e in found]
    return share_of_time([(start, end) for _, start, end in events]), kernels_of(events, steps, most)


def ran_by(model):
    """What explain() says of a module that the engine wraps, and how often its CUDA graphs ran; otherwise nothing."""
    if not hasattr(model, "_ortmodule"):
        return {}
    from ortmodule import explain

    found = {key: value for key, value in asdict(explain(model)).items() if key != "name"}
    graphs = [graph for variants in model._ortmodule.graphs.values() for graph in variants]
    plans = [plan for graph in graphs for session in graph.sessions() for plan in session.plans.values()]
    counts = [sum(numbers) for numbers in zip(*(plan.graphs for plan in plans), strict=True)]
    return found | {"cuda_graphs": dict(zip(("recorded", "updated", "started"), counts, strict=False))}


class Clock:
    """Marks between steps: events of a GPU, waited for at the end only."""

    def __init__(self, device):
        self.device, self.marks = device, []

    def mark(self):
        if self.device == "cpu":
            return self.marks.append(time.perf_counter())
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def seconds(self):
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device == "cpu":
            return [b - a for a, b in pairs]
        finished(self.device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairs]


def measure(row, args):
    column, loop, generator = COLUMNS[args.column], Loop(row, args), torch.Generator().manual_seed(0)
    if reason := column.missing(loop.model):
        return {"missing": reason}
    batches = [loop.batch(row.sized(args.batch), generator) for _ in range(BATCHES)]
    torch.manual_seed(1)
    start = time.perf_counter()
    loop.model = column.wrap(loop.model)
    loop.step(batches[0])
    finished(args.device)
    first, first_peak = time.perf_counter() - start, peak(args.device)
    for batch in batches[1:]:
        loop.step(batch)
    finished(args.device)
    if args.together:
        print("ready", flush=True)
        sys.stdin.readline()
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(args.device)
    clock.mark()
    for i in range(args.steps):
        loss = None  # torch.compile's graphs may write there
        loss = loop.step(batches[i % BATCHES])
        clock.mark()
    step, last = middle(clock.seconds()), loss.item()
    most = peak(args.device)
    busy, kernels = traced(args.device, lambda i: loop.step(batches[i % BATCHES]))
    return {
        "step": step,
        "first_step": first,
        "peak_bytes": most,
        "first_peak_bytes": first_peak,
        "busy": busy,
        "kernels": kernels,
        "loss": last,
        "seconds": time.perf_counter() - start,
        "ran": ran_by(loop.model),
    }


# --- one after the other ----------------------------------------------------------------------------------------------


def kept(file):
    """What a child has said in an earlier call, unless it failed."""
    found = json.loads(file.read_text()) if file.exists() else {"failed": "nothing"}
    return None if "failed" in found else found


def command(args, file, *more):
    given = [args.row, "--device", args.device, "--dtype", str(args.dtype).removeprefix("torch."), *more]
    given += ["--steps", str(args.steps), "--memory", str(args.memory)]
    given += ["--autocast", str(args.autocast).removeprefix("torch.")] if args.autocast else []
    return [sys.executable, "-m", "benchmarks.large", *given, "--answer", str(file)]


def answer(file, code, errors):
    """What a child that has ended says; if it failed, the last of its ``errors``."""
    if code != 0 or not file.exists():
        sys.stderr.write(errors)
        last = errors.strip().splitlines()[-1:] or [f"exit status {code}"]
        file.write_text(json.dumps({"failed": last[0][:300]}))
    return json.loads(file.read_text())


def ask(args, folder, name, *more):
    """What a child of these arguments says; kept in the folder, and not asked again unless it failed."""
    file = folder / f"{name}.json"
    if found := kept(file):
        return found
    done = subprocess.run(command(args, file, *more), stderr=subprocess.PIPE, text=True)
    return answer(file, done.returncode, done.stderr)


def ask_in_turn(args, folder, batch):
    """Of each column, what its child says, one after the other."""
    for name in args.columns:
        yield name, ask(args, folder, name, "--column", name, "--batch", str(batch))


def ask_together(args, folder, batch):
    """Of each column in turn, what its child says: all children make ready at once, and then wait for their turns."""
    files = {name: folder / f"{name}.json" for name in args.columns}
    children = {}
    for name, file in files.items():
        if not kept(file):
            more = command(args, file, "--column", name, "--batch", str(batch), "--together")
            with file.with_suffix(".log").open("w") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                children[name] = subprocess.Popen(more, text=True, **pipes)
    for child in children.values():
        child.stdout.readline()  # it is ready, or has ended
    for name, file in files.items():
        if name in children:
            children[name].communicate("go\n")
            yield name, answer(file, children[name].returncode, file.with_suffix(".log").read_text())
        else:
            yield name, kept(file)


def markdown(report):
    """A row for each column: step, beside eager and torch.compile (its better mode), memory, work, first step."""
    lines = [
        f"{report['title']}; {report['batch']} samples a step; parameters {report['dtype']}, autocast "
        f"{report['autocast']}; {report['steps']} steps",
        "",
        "| backend | step, ms | samples/s | × eager | × compile | peak, GB | of eager's | GPU busy | first step, s "
        "| loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    columns = report["columns"]
    measured = {name: c for name, c in columns.items() if "step" in c}
    eager, compiled = measured.get("eager"), [c for name, c in measured.items() if name.startswith("compile")]
    fastest = min((c["step"]["median"] for c in compiled), default=None)
    for name, c in columns.items():
        if name not in measured:
            lines.append(f"| {name} | {c.get('missing') or 'failed: ' + c['failed']} |" + " |" * 8)
            continue
        now, busy = c["step"]["median"], c["busy"]
        cells = [
            name,
            milliseconds(c["step"]),
            f"{report['batch'] / now:.0f}",
            f"{eager['step']['median'] / now:.2f}" if eager else "–",
            f"{fastest / now:.2f}" if fastest else "–",
            f"{c['peak_bytes'] / 1e9:.2f}",
            f"{c['peak_bytes'] / eager['peak_bytes']:.0%}" if eager else "–",
            "–" if busy is None else f"{busy:.1%}",
            f"{c['first_step']:.1f}",
            f"{c['loss']:.3f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def run(args):
    row, out = EVERY[args.row], Path(args.out)
    folder = out.parent / f"{out.name}-columns"
    folder.mkdir(parents=True, exist_ok=True)
    count = args.batch or row.samples
    report = {"machine": machine(args.device), "row": args.row, "title": row.title, "batch": count, "columns": {}}
    report |= {"dtype": str(args.dtype), "autocast": str(args.autocast), "steps": args.steps}
    if args.fill:
        found = ask(args, folder, "batch", "--fill", str(args.fill), "--batch", str(count))
        if "failed" in found:
            raise SystemExit(f"no number of samples was found: {found['failed']}")
        report |= {"batch": found["batch"], "fill": args.fill, "looked": found}
    for name, found in (ask_together if args.together else ask_in_turn)(args, folder, report["batch"]):
        report["columns"][name] = found
        write(report, markdown(report), out)
    print(markdown(report))
    return 1 if any("failed" in c for c in report["columns"].values()) else 0


def kind_of(name):
    return getattr(torch, name)


def main():
    rows = [name for name, row in EVERY.items() if row.sized]
    columns = [name for name in COLUMNS if name != "ort"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=rows)
    parser.add_argument("--columns", nargs="+", choices=columns, default=["eager", "ortmodule"])
    parser.add_argument("--batch", type=int, default=0, help="samples of a step, or where --fill begins to look")
    parser.add_argument("--fill", type=float, help="share of the GPU's memory that eager is to need")
    parser.add_argument("--memory", type=int, default=0, help="bytes that count as the GPU's memory; 0: what it has")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--autocast", type=kind_of, help="bfloat16, float16")
    parser.add_argument("--dtype", type=kind_of, default=torch.float32, help="of parameters")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--out", default="results/large")
    parser.add_argument("--together", action="store_true", help="all columns make ready at once")
    parser.add_argument("--column", choices=columns, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if args.answer is None:
        return run(args)
    row = EVERY[args.row]
    args.answer.write_text(json.dumps(measure(row, args) if args.column else look_for_batch(row, args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
