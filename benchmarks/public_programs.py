"""Models of public programs, small, trained in PyTorch and through ORTModule: right, and how much the engine runs.

    python -m benchmarks.public_programs [ROW...] [--sources DIR] [--page FILE] [--time STEPS] [--own-sizes STEPS]

The rows are those of benchmarks/public_rows.py; a ROW may have wildcards. Programs that are packages (vit-pytorch,
x-transformers, denoising-diffusion-pytorch) have to be installed, with what they need; the others are folders in DIR,
named as their repositories are. What is not there is left out.

Each model trains for three steps on batches of two sizes, as `python -m tests.models` does it: losses, results, every
gradient and the buffers have to be PyTorch's, in float64 where rounding is magnified. One that draws random numbers in
training is compared so in eval mode, and in training by `ORTMODULE_VERIFY`, which gives PyTorch what the engine drew.
Reported are

    right       what was compared, or what is wrong
    calls       the share of the calls that the engine has run, in training, of STEPS_OF_SHARE calls, every graph
                captured at once (ORTMODULE_CAPTURE_SHARE=inf, unless it is set), those of parts of islands, too,
                which otherwise wait until calls turn out to be long: at the sizes here they are not
    work        the share of the weights that the engine computes with, those of operators that PyTorch runs inside the
                graph (convolutions) among them
    islands     what PyTorch runs inside the graph
    why         why PyTorch runs the module or the islands, where it is known
    time        seconds of a step by those of PyTorch's, with --time: the median of STEPS turns, captures left out

With --own-sizes no more than that is measured: the same of the rows of benchmarks/public_sizes.py, at the sizes that
their programs train with.

With --page the table is written into FILE (docs/public-programs.md), and behind it what times there are.
"""

import argparse
import fnmatch
import functools
import json
import logging
import os
import sys
import textwrap
import time
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from statistics import median

import torch

from benchmarks.public_rows import ROWS, Sources
from benchmarks.public_sizes import SIZES
from benchmarks.report import machine
from ortmodule import ORTModule, explain
from ortmodule.runtime.calls import parts
from tests.models import trial

STEPS_OF_SHARE = 10
LEAST = 0.9  # of calls and of work
MOST = 1 / 0.97  # of PyTorch's time
LEAST_STEPS, MOST_SECONDS = 4, 30.0  # of a model that is measured
WARM, MOST_WARM = 4, 40
HEAD = """# Public programs

Made by `python -m benchmarks.public_programs --sources DIR --page docs/public-programs.md`: models of public training
programs, with the sizes in their own arguments shrunk and no line of theirs changed. Each trains beside PyTorch on
batches of two sizes: *right* says that losses, results, all gradients and buffers are PyTorch's, *in float64* where
rounding is magnified, *verified* that `ORTMODULE_VERIFY` has compared the steps of a model that draws random numbers in
training. *calls* and *work* are the shares of the calls that the engine has run, and of the weights that it computes
with; *islands* are what PyTorch runs inside the graph. Weights of its operators there (convolutions) count as the
engine's, those of its submodules do not, but for parts of them that are graphs of their own. Such parts are captured
where calls take 10 ms; here they are at once, as the models are shrunk.
"""


def subject(row, find):
    """The row as tests/models/trial.py takes it."""
    build = functools.partial(row.build, find)
    return trial.Subject(build, lambda module, size, g: row.batch(size, g), row.program, anew=True, double=row.double)


def compared(name, row, find):
    """What became of a row, and a word on it."""
    given = subject(row, find)
    outcome = trial.attempt(name, given)
    words = [outcome.state]
    if outcome.mode == "eval" and outcome.state in (trial.RIGHT, trial.DOUBLE):
        drawn = trial.Outcome(name)
        try:
            trial.check_draws(given, drawn)
        except Exception as error:
            drawn.state, drawn.reason = trial.WRONG, f"in training: {type(error).__name__}: {error}"
        said = {trial.RIGHT: "verified", trial.WRONG: drawn.reason}
        words.append(said.get(drawn.state, "its draws cannot be compared"))
        if drawn.state == trial.WRONG:
            outcome.state, outcome.reason = trial.WRONG, drawn.reason
    elif outcome.mode == "verified":
        words.append("verified")
    if outcome.state in (trial.WRONG, trial.UNBUILT):
        words = [outcome.state, outcome.reason]
    return outcome.state, ", ".join(words)


def shares(row, find):
    """Of the calls, and of the weights; what PyTorch runs, and why."""
    torch.manual_seed(0)
    module = ORTModule(row.build(find).train())
    for number in range(STEPS_OF_SHARE):
        trial.step(module, row.batch(number % 2, torch.Generator().manual_seed(number)))
    report = explain(module)
    calls = report.engine_calls / max(report.engine_calls + report.pytorch_calls, 1)
    work = report.weights_in_engine if report.captured else 0.0
    islands = [*report.aten_ops, *report.python_ops]
    return {"calls": calls, "work": work, "islands": islands, "why": trial.general(report.fallback or "")}


def ratio(row, find, steps, sizes=2):
    """Seconds of a step: ours by PyTorch's, and PyTorch's. ``sizes``: of batches, in turns. Of long steps fewer. Steps
    count once there were WARM in a row without a capture."""
    torch.manual_seed(0)
    eager = row.build(find).train()
    ours, turns = ORTModule(row.build(find).train()), []
    captures, warm, number = 0.0, 0, 0
    while len(turns) < steps and (len(turns) < LEAST_STEPS or sum(map(sum, turns)) < MOST_SECONDS):
        batch, seconds = row.batch(number % sizes, torch.Generator().manual_seed(number)), {}
        for module in (eager, ours) if number % 2 else (ours, eager):
            start = time.perf_counter()
            trial.step(module, batch)
            seconds[module is ours] = time.perf_counter() - start
        before, captures = captures, explain(ours).capture_seconds
        number, warm = number + 1, warm + 1 if before == captures else 0
        if warm > WARM or number > MOST_WARM:
            turns.append((seconds[True], seconds[False]))
    return median(a / b for a, b in turns), median(b for _, b in turns)


def measured(name, find, steps):
    row = ROWS[name]
    state, right = compared(name, row, find)
    found = {"program": row.program, "model": row.model, "state": state, "right": right}
    if state != trial.UNBUILT:
        found |= {"calls": 0.0, "work": 0.0, "islands": [], "why": ""}
        try:
            found |= shares(row, find)
            if steps:
                found["time"], _ = ratio(row, find, steps)
        except Exception as error:
            found["state"], found["right"] = trial.WRONG, f"{type(error).__name__}: {error}"
    return found


def reached(found):
    return found["calls"] >= LEAST and found["work"] >= LEAST


def counted(rows):
    """How many are right, how many are reached, and what the others are."""
    tried = {name: found for name, found in rows.items() if found.get("state", trial.UNBUILT) != trial.UNBUILT}
    right = sum(found["state"] in (trial.RIGHT, trial.DOUBLE) for found in tried.values())
    inside = sum(map(reached, tried.values()))
    islands = [found["islands"] for found in tried.values() if found["islands"]]
    modules = sum(not all(name.startswith("aten::") for name in names) for names in islands)
    whole = f"at least {LEAST:.0%} of the calls and of the weights"
    lines = [
        f"{len(tried)} models, {right} right. {inside} have {whole} in the",
        f"engine. {len(islands)} have islands: {len(islands) - modules} of them operators alone, {modules} submodules,"
        " methods or",
        "autograd functions.",
    ]
    others = [
        f"- {found['program']}, {found['model']}: {found['calls']:.0%} of the calls, {found['work']:.0%} of the weights"
        for found in tried.values()
        if not reached(found)
    ]
    return "\n".join([*lines, *(["", "Less of:", "", *others] if others else [])])


def markdown(rows):
    lines = ["| program | model | right | calls | work | islands | why |"]
    lines.append("| --- | --- | --- | ---: | ---: | --- | --- |")
    for name, found in rows.items():
        if found.get("state", trial.UNBUILT) == trial.UNBUILT:
            continue
        noted = found["islands"] or found["state"] == trial.WRONG or found["calls"] < LEAST
        why = found["why"] or (ROWS[name].note if noted else "")
        cells = [found["program"], found["model"], found["right"], f"{found['calls']:.0%}", f"{found['work']:.0%}"]
        cells += [", ".join(found["islands"]) or "–", why or "–"]
        lines.append(f"| {' | '.join(cell.replace('|', '/').replace('[', '(').replace(']', ')') for cell in cells)} |")
    return "\n".join([*lines, ""])


def measured_where():
    return f"{machine()['cpu']}, {torch.get_num_threads()} threads, {date.today()}"


def timed(rows):
    """How long steps take by PyTorch's; "": no times were measured."""
    times = {name: found["time"] for name, found in rows.items() if "time" in found}
    if not times:
        return ""
    slow = sorted(((time, name) for name, time in times.items() if time > MOST), reverse=True)
    fast = f"at most {MOST:.2f} for {len(times) - len(slow)} of {len(times)} models"
    text = (
        f"Seconds of a step, forward and backward, by PyTorch's, captures left out ({measured_where()}): "
        f"{median(times.values()):.2f} in the middle, {fast}."
    )
    if slow:
        text += f" More: {', '.join(f'{name} {time:.2f}' for time, name in slow)}."
    text += " Of the shrunk models many take less than a millisecond, where a call's own cost counts most."
    return f"\n{textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)}\n"


def at_own_sizes(rows):
    """The same of models at the sizes that their programs train with; "": none were measured."""
    found = {name: rows[name]["own"] for name in SIZES if "own" in rows.get(name, {})}
    if not found:
        return ""
    lines = [
        f"Those at the sizes that their programs train with (`--own-sizes`; {measured_where()}):",
        "",
        "| program | sizes | PyTorch, ms a step | ours by PyTorch's | what is behind it |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for name, own in found.items():
        sizes, row = SIZES[name]
        why = row.note if own["time"] > MOST else ""
        lines.append(f"| {name} | {sizes} | {1e3 * own['eager']:.2f} | {own['time']:.2f} | {why or '–'} |")
    return "\n".join(["", *lines, ""])


def page(rows):
    """docs/public-programs.md."""
    return f"{HEAD}\n{counted(rows)}\n\n{markdown(rows)}{timed(rows)}{at_own_sizes(rows)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="as 'nanoGPT*'; all")
    parser.add_argument("--sources", metavar="DIR", help="where programs lie that are no packages")
    parser.add_argument("--known", action="store_true", help="take what <out>.json has as it is, and run the others")
    parser.add_argument("--page", metavar="FILE", help="write the table there")
    parser.add_argument("--time", type=int, default=0, metavar="STEPS", help="measure so many")
    parser.add_argument("--own-sizes", type=int, default=0, metavar="STEPS", help="so many, at the programs' own sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="results/public-programs")
    args = parser.parse_args()
    names = [n for n in ROWS if not args.rows or any(fnmatch.fnmatch(n, pattern) for pattern in args.rows)]
    if not names:
        parser.error(f"no row is called {' '.join(args.rows)}")
    if args.own_sizes:
        names = [name for name in names if name in SIZES]
    # Steps are too short for a second graph to pay, or for parts of islands.
    os.environ.setdefault("ORTMODULE_CAPTURE_SHARE", "inf")
    if not args.own_sizes:
        parts.LEAST_CALLS, parts.LEAST_SECONDS = 1, 0.0
    logging.getLogger("ortmodule").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    path, rows = Path(f"{args.out}.json"), {}
    path.parent.mkdir(parents=True, exist_ok=True)
    if (args.rows or args.known or args.own_sizes) and path.exists():  # the others are as they were
        rows = json.loads(path.read_text())
    for name in names if args.own_sizes else ():
        time, eager = ratio(SIZES[name][1], Sources(args.sources), args.own_sizes, 1)
        rows.setdefault(name, {})["own"] = {"time": time, "eager": eager}
        print(f"{name}: {time:.2f} of {1e3 * eager:.2f} ms", flush=True)
        path.write_text(json.dumps(rows, indent=1))
    for name in (each for each in names if not (args.own_sizes or (args.known and each in rows))):
        own = {key: rows[name][key] for key in ("own",) if key in rows.get(name, {})}
        found = rows[name] = measured(name, Sources(args.sources), args.time) | own
        said = ""
        if "calls" in found:
            said = " ".join([f"{found['calls']:.0%}", f"{found['work']:.0%}", *found["islands"], found["why"]])
        timed = f" {found['time']:.2f}" if "time" in found else ""
        print(f"{name}: {found['right']} {said}{timed}", flush=True)
        rows = {each: rows[each] for each in ROWS if each in rows}
        path.write_text(json.dumps(rows, indent=1))
    if args.page:
        Path(args.page).write_text(page(rows))
    print(dict(Counter(found.get("state", "") for found in rows.values())))
    sys.exit(any(found.get("state") == trial.WRONG for found in rows.values()))


if __name__ == "__main__":
    main()
