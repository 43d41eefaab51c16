"""Measures memory and time of forward and backward: eager, checkpointing, torch.compile, ORTModule with budgets.

    python -m benchmarks.memory                                  the usual rows
    python -m benchmarks.memory --rows gpt2-long --autocast bfloat16 --out results/memory
    python -m benchmarks.memory --rows bert-base --ways eager checkpointing ortmodule level-1

Each way has a process of its own with the row's model; the processes take turns, one step at a time, all with one
batch, since what padding leaves counts. A step is forward and backward. Memory is the most that malloc and the engine
have taken at once above what they held before the step, counted in each call (tests/engine/counting_malloc.c), so no
allocator's habits are in it, and neither are weights and an optimizer's states. It is given for a step that makes its
gradients, and for one that adds to gradients that exist, as in accumulation: activations and workspace, and gradients
on their way. Activations and workspace alone are ORTModule's arena in such a step; of PyTorch they are at least what it
takes less the largest gradient. Seconds are medians; the ratio is the median, with quartiles, of each turn's quotient.
Written to <out>.json and <out>.md.
"""

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.columns import receive, send
from benchmarks.report import machine, middle, milliseconds, speedup, write
from benchmarks.rows import EVERY

SOURCE = Path(__file__).parents[1] / "tests/engine/counting_malloc.c"
ROWS_OF_TABLE = ("bert-base", "gpt2-long", "llama-100m", "t5-small", "vit-small-32", "resnet-50")
WARM = 3  # steps before anything is measured: the third makes the plan that leaves out logits which were not read


def checkpointed(model, batch):
    model.gradient_checkpointing_enable()
    return model


def compiled(model, batch):
    return torch.compile(model)


def compiled_to_a_budget(model, batch):
    torch._functorch.config.activation_memory_budget = 0.5
    return torch.compile(model)


def wrapped(model, batch, **settings):
    from ortmodule import Config, ORTModule

    return ORTModule(model, config=Config(**settings))


def budget_of(share):
    """Wraps the model with the price of its Pareto curve whose peak is nearest to this share of what is free to be
    spent: 0 is the least memory, 1 is all that it takes without a budget."""

    def wrap(model, batch):
        from ortmodule import memory

        peaks = [price.peak for price in memory.pareto(model, batch)]
        wish = min(peaks) + share * (max(peaks) - min(peaks))
        return wrapped(model, batch, memory_budget=min(peaks, key=lambda peak: abs(peak - wish)))

    return wrap


#: The first is what the others are compared with.
WAYS = {
    "eager": ("eager", lambda model, batch: model),
    "checkpointing": ("eager, `gradient_checkpointing_enable()`", checkpointed),
    "compile": ("torch.compile", compiled),
    "compile-budget": ("torch.compile, `activation_memory_budget = 0.5`", compiled_to_a_budget),
    "ortmodule": ("ORTModule", wrapped),
    "level-1": ("ORTModule, `MEMORY_OPT_LEVEL=1`", lambda model, batch: wrapped(model, batch, memory_opt_level=1)),
    "half": ("ORTModule, a budget half way to the least", budget_of(0.5)),
    "least": ("ORTModule, the least budget", budget_of(0)),
}


# --- the process of one way -------------------------------------------------------------------------------------------


class Steps:
    """The row's model, run in one way."""

    def __init__(self, row, way, autocast):
        torch.manual_seed(0)
        row, self.autocast = EVERY[row], autocast and getattr(torch, autocast)
        with self.cast():
            self.batch = row.batch(torch.Generator().manual_seed(1))
            self.model = WAYS[way][1](row.build().train(), self.batch)

    def cast(self):
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def run(self, adds):
        """(seconds, bytes) of one step, which makes its gradients, or ``adds`` to those of the last."""
        from ortmodule import _core

        most_growth = ctypes.CDLL(os.environ["LD_PRELOAD"]).most_growth
        most_growth.restype = ctypes.c_long
        if not adds:
            self.model.zero_grad()
        gc.collect()
        most_growth()
        _core.memory_most()
        before = _core.memory()["used"]
        start = time.perf_counter()
        with self.cast():
            outputs = self.model(**self.batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        del outputs
        loss.backward()
        seconds = time.perf_counter() - start
        return seconds, most_growth() + _core.memory_most() - before

    def largest_gradient(self):
        return max((p.nbytes for p in self.model.parameters() if p.requires_grad), default=0)

    def arena(self):
        """Bytes of the last step's activations and workspace; 0 where PyTorch has run it. (None is no answer.)"""
        state = getattr(self.model, "_ortmodule", None)
        if state is None or state.latest is None:
            return 0
        made = [found.plan for found in state.latest.executables.plans.values() if found.plan.differentiates]
        return made[-1].arena_bytes


def serve():
    """Answers a `Way`, which asks for the row, the way and the type of autocast, then for methods of `Steps`."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever is printed is no answer
    steps = None
    while (question := receive(sys.stdin.buffer)) is not None:
        try:
            if steps is None:
                steps = Steps(*question)
                answer = "ready"
            else:
                answer = getattr(steps, question[0])(*question[1:])
        except Exception as e:
            answer = e.__class__.__name__ + ": " + str(e).partition("\n")[0]
        send(answers, answer)


class Way:
    """A process that runs the row in one way. ``failed`` says why it cannot."""

    def __init__(self, row, way, autocast, library):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.memory", "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LD_PRELOAD": str(library)},
        )
        self.seconds, self.bytes, self.failed = [], [], None
        self.adding = 0  # bytes of a step that adds to gradients
        self.alone = None  # those of its activations and workspace
        self._ask((row, way, autocast))

    def _ask(self, question):
        try:
            send(self._process.stdin, question)
            answer = receive(self._process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self.failed = f"its process ended with code {self._process.wait()}"
        elif isinstance(answer, str) and answer != "ready":
            self.failed = answer
        return answer

    def step(self, counts):
        answer = None if self.failed else self._ask(("run", False))
        if counts and not self.failed:
            self.seconds.append(answer[0])
            self.bytes.append(answer[1])

    def add(self):
        """The last steps. One that a budget has no room for leaves the others' figures."""
        if self.failed:
            return
        for _ in range(WARM):
            if not self.failed:
                answer = self._ask(("run", True))
                self.adding = None if self.failed else answer[1]
        if self.adding is not None:
            self.alone = self._ask(("arena",)) or self.adding - self._ask(("largest_gradient",))
        if self.bytes and self.adding is None:
            self.failed = None

    def figures(self):
        if self.failed:
            return {"failed": self.failed}
        return {"seconds": self.seconds, "bytes": {"step": max(self.bytes), "adding": self.adding, "alone": self.alone}}

    def close(self):
        self._process.stdin.close()
        self._process.wait()


# --- the table --------------------------------------------------------------------------------------------------------


def measure(row, args, library):
    """{way: `Way.figures`}."""
    ways = {way: Way(row, way, args.autocast, library) for way in args.ways}
    for turn in range(WARM + args.steps):
        for way in ways.values():
            way.step(counts=turn >= WARM)
    for way in ways.values():
        way.add()
        way.close()
    return {name: way.figures() for name, way in ways.items()}


def beside(count, first):
    """Bytes, and how many times the first's they are. None: no such step ran."""
    if count is None:
        return "–"
    return f"{count / 1e6:,.0f}" + (f" ({count / first:.2f})" if first else "")


def table(row, found):
    lines = [f"### {EVERY[row].title}", ""]
    lines.append("| way | a step, MB | adding to gradients | activations, workspace | ms | times the first's |")
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    first = next(iter(found.values()))
    for name, figures in found.items():
        if "failed" in figures:
            lines.append(f"| {WAYS[name][0]} | {figures['failed']} | | | | |")
            continue
        memory = [beside(n, first.get("bytes", {}).get(what)) for what, n in figures["bytes"].items()]
        ratio = "–"
        if "seconds" in first:
            times = speedup(figures["seconds"], first["seconds"])
            ratio = f"{times['median']:.2f} [{times['low']:.2f}, {times['high']:.2f}]"
        cells = [WAYS[name][0], *memory, milliseconds(middle(figures["seconds"])), ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def counting_malloc(folder):
    """The library that is preloaded."""
    library = Path(folder) / "counting_malloc.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True)
    return library


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS_OF_TABLE, choices=sorted(EVERY), metavar="ROW")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--autocast", choices=["bfloat16", "float16"])
    parser.add_argument("--out", type=Path, default=Path("results/memory"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    found, lines = {}, []
    with tempfile.TemporaryDirectory() as folder:
        library = counting_malloc(folder)
        for row in args.rows:
            found[row] = measure(row, args, library)
            lines += table(row, found[row])
            print(*lines[-len(found[row]) - 5 :], sep="\n", flush=True)
            report = {"machine": machine(), "autocast": args.autocast, "rows": found}
            write(report, "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
