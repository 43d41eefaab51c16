"""Measures what captures cost where Python decides with data: 12 modules over real lengths.

    python -m benchmarks.regret [ROW...] [--steps 200] [--threads 1]

The modules are those of benchmarks/regret_models.py: six whose Python reads nothing but lengths (a cut at the longest
member of a batch, a loop over time, a list of tensors, graphs, a split, a loop over a batch), and six others (an early
exit, a mixture of experts, a queue, an annealed factor, scheduled sampling, a curriculum). Lengths are those of the
docstrings of Python's standard library in words and signs, cut at 64. PyTorch and ORTModule start from the same weights
and take each step in turn, on the same batch, so that other work on the machine hits both; a step is forward, backward
and SGD. Seconds of all steps are summed, captures included. Reported are

    eager, ours, first      seconds of all steps, and of the first capture among ours
    with, without           ours by eager's, the first capture included and left out
    graphs, captures        that were made, and seconds that all of them took
    difference              the largest of two losses of a step, relative

What must hold: at most 1.1 without the first capture for each, and at most 0.7 where Python only reads lengths.
Written to <out>.json and <out>.md after each row.
"""

import argparse
import copy
import logging
import time
import warnings
from pathlib import Path

import torch

from benchmarks.regret_models import ROWS
from benchmarks.report import machine, write
from ortmodule import ORTModule, explain

MOST, MOST_OF_LENGTHS = 1.1, 0.7


class Column:
    """One of the two that learn."""

    def __init__(self, module, row):
        self.module, self.row, self.seconds, self.loss = module, row, 0.0, 0.0
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(self, number, batch):
        self.row.before(self.module, number)
        start = time.perf_counter()
        loss = self.module(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds += time.perf_counter() - start
        self.loss = loss.item()


def measured(name, steps):
    """The figures of one row."""
    torch.manual_seed(0)
    row = ROWS[name]
    eager = Column(row.build().train(), row)
    ours = Column(ORTModule(copy.deepcopy(eager.module)), row)
    difference = 0.0
    for number in range(steps):
        batch = row.batch(number)
        for column in (eager, ours) if number % 2 else (ours, eager):
            column.step(number, batch)
        difference = max(difference, abs(eager.loss - ours.loss) / max(abs(eager.loss), 1e-6))
    report = explain(ours.module)
    first = report.first_capture_seconds
    return {
        "lengths": row.lengths,
        "eager": eager.seconds,
        "ours": ours.seconds,
        "first": first,
        "with": ours.seconds / eager.seconds,
        "without": (ours.seconds - first) / eager.seconds,
        "graphs": report.exports,
        "captures": report.capture_seconds,
        "difference": difference,
        "explain": str(report),
    }


def most(figures):
    return MOST_OF_LENGTHS if figures["lengths"] else MOST


def markdown(report):
    about = report["machine"]
    lines = [
        f"{about['cpu']}; torch {about['torch']}, {about['threads']} threads, {report['steps']} steps",
        "",
        "| module | eager s | ours s | first s | with | without | at most | graphs | captures s | difference |",
        "| --- |" + " ---: |" * 9,
    ]
    for name, found in report["rows"].items():
        times = " | ".join(f"{found[key]:.2f}" for key in ("eager", "ours", "first", "with", "without"))
        rest = f"{found['graphs']} | {found['captures']:.2f} | {found['difference']:.0e}"
        missed = "" if found["without"] <= most(found) else " missed"
        lines.append(f"| {name} | {times} | {most(found):g}{missed} | {rest} |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {' '.join(ROWS)}; all")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="results/regret")
    args = parser.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}")
    logging.getLogger("ortmodule").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    report = {"machine": machine(), "steps": args.steps, "rows": {}}
    for name in args.rows or ROWS:
        report["rows"][name] = measured(name, args.steps)
        print(report["rows"][name]["explain"], flush=True)
        write(report, markdown(report), Path(args.out))
    print(markdown(report))


if __name__ == "__main__":
    main()
