"""Asks a GPU about the engine for eight minutes, the most telling first, a line for each answer.

    scripts/gpu triage                      all of it
    scripts/gpu triage --items 'linear*'    only these
    scripts/gpu triage --left               what has not run yet, or was stopped

This process never touches the GPU. Items (benchmarks/triage_items.py) run in children, a group in one; a child that
crashes or hangs costs the item that it was at, and another one goes on with the next. An item ends in one of these
states:

    ok          it ran, and results are as near to float64 as PyTorch's own
    wrong       it ran, and they are not: the line says which tensor, and the first operator that differs
    not ours    results are right because PyTorch ran it, all or in part: the line says why
    failed      an exception: its type and text
    crashed     the process ended: its signal, and the last that it said
    stopped     it took longer than its limit
    left out    the eight minutes were over
"""

import argparse
import contextlib
import fnmatch
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from benchmarks.journal import Journal

IMPORT_LIMIT = 90  # seconds until a child begins its first item
REHEARSAL = 10  # times as long an item may take there: the emulated GPU is a CPU, which others use, too
LEAST = 3  # seconds that are worth beginning an item for
DTYPES = ("float32", "bfloat16")
OPERATORS = ("linear", "layer-norm", "attention", "attention-grouped", "attention-dropout")
OPERATORS += ("embedding", "cross-entropy", "adam")
STEPS = ("llama-1b", "bert-large", "gpt2-medium")
UNSETTLED = ("stopped", "left out", "crashed")
MOST_REASON = 600  # characters


@dataclass(frozen=True)
class Group:
    """Items that share a process, and the seconds that each may take."""

    name: str
    items: tuple
    limit: int


def of_steps(**limits):
    """Each in a process of its own, and the seconds that it may take by its column."""
    return [Group("steps", (f"{row} {column}",), limit) for row in STEPS for column, limit in limits.items()]


GROUPS = [
    Group("libraries", ("device", "engine", "first-kernel", "cublaslt", "cudnn", "nccl", "nvrtc"), 30),
    Group("operators", tuple(f"{name} {dtype}" for dtype in DTYPES for name in OPERATORS), 20),
    Group("replay", ("graphs mlp", "graphs gpt2-small"), 30),
    Group("models", tuple(f"{name} {kind}" for name in ("gpt2", "llama") for kind in ("float32", "autocast")), 30),
    *of_steps(ortmodule=110, eager=60),
    *of_steps(compile=100),
]


# --- children ---------------------------------------------------------------------------------------------------------


class Child:
    """A process that runs items, in order, and says what it is at."""

    def __init__(self, names, more, log, command=()):
        command = command or [sys.executable, "-m", "benchmarks.triage_items", "--items", *names, *more]
        self.errors, self.log, self.events = [], log, queue.Queue()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _read(self):
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def _listen(self):
        for line in self.process.stderr:
            self.errors = [*self.errors[-30:], line.rstrip()]
            self.log.write(line)
            self.log.flush()

    def next(self, seconds):
        """What it says next; None: it has ended. queue.Empty: nothing in that time."""
        return self.events.get(timeout=max(0.0, seconds))

    def end(self):
        """Its exit status. It may hang in the driver, where nothing ends it: that is not waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            return None
        return self.process.returncode

    def why(self):
        """How it ended by itself, with the last lines that it wrote."""
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            code = self.end()
        self._listener.join(5)
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        lines = [line.strip() for line in self.errors if line.strip()]
        return f"{how}: {' / '.join(lines[-3:])}"[:MOST_REASON]


class Triage:
    """One run. ``say(record)`` is told of every item as it is settled."""

    def __init__(self, journal, log, end, more, start=Child, slack=1):
        """``end``: by time.monotonic(). ``slack``: limits of items are so often as long."""
        self.journal, self.log, self.end, self.more, self.start = journal, log, end, more, start
        self.slack = slack

    def left(self):
        return self.end - time.monotonic()

    def settle(self, group, item, state, seconds=0.0, **figures):
        record = self.journal.add(
            "triage", item=item, group=group.name, state=state, seconds=round(seconds, 2), **figures
        )
        print(sentence(record), flush=True)

    def run(self, groups):
        for group in groups:
            waiting = list(group.items)
            while waiting and self.left() > LEAST:
                waiting = self.run_some(group, waiting)
            for item in waiting:
                self.settle(group, item, "left out", reason="the time was over")

    def run_some(self, group, waiting):
        """In one child; returns the items that it has not got to."""
        child = self.start(waiting, self.more, self.log)
        item, began = None, time.monotonic()  # None: it is still importing
        try:
            while True:
                limit = self.slack * (IMPORT_LIMIT if item is None else group.limit)
                limit = min(limit, self.end - began)
                try:
                    event = child.next(began + limit - time.monotonic())
                except queue.Empty:
                    what = "it was still starting" if item is None else "it was still running"
                    ended = "" if child.end() is not None else "; its process cannot be ended"
                    reason = f"{what} after {limit:.0f} s{ended}"
                    self.settle(group, waiting[0], "stopped", time.monotonic() - began, reason=reason)
                    return waiting[1:]
                spent = time.monotonic() - began
                if event is None:
                    if item is not None or waiting:
                        self.settle(group, waiting[0], "crashed", spent, reason=child.why())
                    return waiting[1:]
                if "begin" in event:
                    item, began = event["begin"], time.monotonic()
                    continue
                self.settle(group, item, event.pop("state"), spent, **event)
                waiting, item, began = waiting[1:], None, time.monotonic()
                if not waiting:
                    return []
                if self.left() < LEAST:
                    return waiting
        finally:
            child.end()


# --- what it says -----------------------------------------------------------------------------------------------------


def milliseconds(seconds):
    return "–" if seconds is None else f"{1e3 * seconds:.3g}"


def sentence(record):
    """A line for people who watch."""
    parts = [f"{record['item']:28} {record['state']:9}"]
    if "eager" in record:
        ratio = record["eager"] / record["ours"] if record.get("ours") else 0
        parts.append(f"{milliseconds(record.get('ours'))} ms, eager {milliseconds(record['eager'])} ms, {ratio:.2f}×")
    elif "ours" in record:
        parts.append(f"{milliseconds(record['ours'])} ms")
    if record.get("peak") is not None:
        parts.append(f"peak {record['peak'] / 1e9:.2f} GB")
    parts += [str(record[key]) for key in ("said", "reason") if record.get(key)]
    return "  ".join(parts)


def who_ran(ran):
    """Of an item's explain(): the engine, or what PyTorch ran and why."""
    if not ran:
        return ""
    if not ran["captured"]:
        return f"PyTorch: {ran['fallback']}"
    outside = [*ran["aten_ops"], *ran["python_ops"]]
    return "the engine" + (f", PyTorch {', '.join(outside)}" if outside else "")


def steps_table(records):
    """Of each model a line: its columns beside each other."""
    heads = ["step", "ours, ms", "eager, ms", "torch.compile, ms", "× eager", "× compile", "peak, GB: these three"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * 5 + " --- |"]
    for row in STEPS:
        found = {column: records.get(f"{row} {column}", {}) for column in ("ortmodule", "eager", "compile")}
        ours, eager, compiled = (found[column].get("ours") for column in found)
        peaks = [f"{each['peak'] / 1e9:.2f}" if each.get("peak") else "–" for each in found.values()]
        cells = [row, *map(milliseconds, (ours, eager, compiled))]
        cells += [f"{other / ours:.2f}" if ours and other else "–" for other in (eager, compiled)]
        lines.append("| " + " | ".join([*cells, ", ".join(peaks)]) + " |")
    return lines


def table(records):
    """Lines of Markdown: every item, then steps side by side."""
    records = list(records)
    lines = ["| item | state | ours, ms | eager, ms | × | error: ours, eager's | who ran it | what it says |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- | --- | --- |"]
    for record in records:
        ours, eager, errors = record.get("ours"), record.get("eager"), record.get("errors")
        cells = [
            record["item"],
            record["state"],
            milliseconds(ours),
            milliseconds(eager),
            f"{eager / ours:.2f}" if ours and eager else "–",
            ", ".join(f"{error:.1e}" for error in errors) if errors else "–",
            who_ran(record.get("ran")),
            "; ".join(str(record[key]) for key in ("said", "reason") if record.get(key)),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    by_name = {record["item"]: record for record in records}
    if any(record["group"] == "steps" for record in records):
        lines += ["", *steps_table(by_name)]
    return lines


# --- the run ----------------------------------------------------------------------------------------------------------


def chosen(groups, patterns, settled):
    """The groups with those of their items that a pattern names and that are not in ``settled``."""
    found = []
    for group in groups:
        items = [i for i in group.items if any(fnmatch.fnmatch(i, p) for p in patterns) and i not in settled]
        if items:
            found.append(Group(group.name, tuple(items), group.limit))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default="results/gpu/results.jsonl")
    parser.add_argument("--log", default=os.devnull)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=465, help="of all items together")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal on a CPU")
    parser.add_argument("--items", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--left", action="store_true", help="only what has not run, or was stopped")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    journal = Journal(args.results)
    known = journal.latest("triage", "item").values() if args.left else ()
    groups = chosen(GROUPS, args.items, {r["item"] for r in known if r["state"] not in UNSETTLED})
    if not groups:
        print("there is no such item, or nothing is left")
        return 1
    more = ["--device", args.device] + ["--small"] * args.small
    with open(args.log, "a") as log:
        Triage(journal, log, end, more, slack=REHEARSAL if args.small else 1).run(groups)
    latest = journal.latest("triage", "item")
    states = [latest[item]["state"] for group in groups for item in group.items]
    print(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    return 0 if set(states) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
