"""Writes docs/ops.md, from the case list and the operator records: what the cases cover.

    python -m tests.ops.table                      writes docs/ops.md
    python -m tests.ops.table --measure [NAME...]  with new figures, of these operators or all; others stay. The page
                                                   says when and where all were measured

A case belongs to the newest record of its operator that is not newer than its opset. Operators of our own domain
have no cases: they are reached through gradients and passes, so they are looked for in the plans of all cases.
"""

import re
import sys
import time
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch

from tests.ops import bench
from tests.ops.cases import ALL, CASES, FLOAT
from tests.ops.harness import Trial
from tests.tolerances import OPERATOR, bounds

PATH = Path(__file__).parents[2] / "docs" / "ops.md"


@cache
def registry():
    from ortmodule import _core

    return _core.operators()


def records_of(case):
    """The records a case belongs to."""
    domain, _, name = case.op.rpartition("::")
    known = [r for r in registry() if r["name"] == name and r["domain"] == domain and r["since"] <= case.opset]
    if case.some_cpus:  # plans of other CPUs have other operators; the page is the same on all
        return known
    trial = Trial(case, case.dtypes[0])
    trial.plan(training=bool(trial.wrt))
    text = "".join(plan.text() for plan in [*trial.session.plans.values(), *trial.probes])
    names = set(re.findall(r"= (\w+)\(", text))
    names |= {step for steps in re.findall(r'steps="([^"]*)"', text) for step in steps.split()}
    ours = [r for r in registry() if r["domain"] and r["name"] in names]
    if case.nodes and case.op not in [op for op, *_ in case.nodes]:  # the case of a pass that makes it
        return ours
    known = [r for r in known if r not in ours]
    return ours + sorted(known, key=lambda r: r["since"])[-1:]


@cache
def reached():
    """(name, since) of a record -> how many cases reach it; and the types they run it with."""
    counts, types = defaultdict(int), defaultdict(set)
    for case in CASES:
        for record in records_of(case):
            key = record["name"], record["since"]
            counts[key] += 1
            types[key] |= set(case.dtypes)
    return counts, types


#: Run by Triton's interpreter, over all cases (tests/triton_kernels).
BY_TRITON = ("TritonChain", "TritonChainRandom")
#: Which only the planner emits (tests/engine/test_offload.py, tests/cuda/test_offload.py).
BY_PLANNER = ("Offload", "OffloadEnd", "Reload", "ReloadEnd")


def untested():
    """Operators without a case; those that only GPUs have are tested with a GPU (tests/cuda)."""
    cases, _ = reached()
    both = (r for r in registry() if (r["has_kernel"] or not r["has_cuda"]) and r["name"] not in BY_TRITON + BY_PLANNER)
    return sorted(f"{r['name']} (since {r['since']})" for r in both if not cases[r["name"], r["since"]])


# --- figures ----------------------------------------------------------------------------------------------------------

NONE = "–"
SECONDS = 0.06  # to time a phase of a case
TIMED = 3  # cases of an operator
FIGURES = ("tolerance used", "forward", "backward")


def known():
    """The figures that are in the file: (name, since) -> texts."""
    found = {}
    for line in PATH.read_text().splitlines() if PATH.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 + len(FIGURES) and cells[2].isdigit():
            found[cells[0], int(cells[2])] = cells[7:]
    return found


MEASURED = re.compile(r"^Figures are of (.*?): day and CPU of the latest", re.M)


def known_place():
    """Day and CPU of the latest measurement of all figures that are in the file."""
    found = MEASURED.search(PATH.read_text()) if PATH.exists() else None
    return found[1] if found else "an unknown day"


def share_of(found, expected, allowed):
    """Largest difference of two tensors, as a share of what is allowed."""
    if not found.is_floating_point() or not found.numel():
        return 0.0
    a, b = found.double(), expected.double()
    share = (a - b).abs() / (allowed * bounds(b, *OPERATOR[found.dtype])).clamp(min=1e-300)
    return float(share[b.isfinite()].max()) if b.isfinite().any() else 0.0


def tolerance_used(case):
    """Of results and gradients in all float types of a case."""
    most = 0.0
    for dtype in set(case.dtypes) & set(FLOAT):
        trial = Trial(case, dtype)
        run = trial.run(training=bool(trial.wrt))
        pairs = [*zip(run.outputs, trial.expected.outputs, strict=True)]
        pairs += [(run.grads[i], trial.expected.grads[i]) for i in trial.wrt]
        most = max([most, *(share_of(a, b, case.tol) for a, b in pairs if a is not None and b is not None)])
    return most


def measure(names):
    """As `known`, by trying and timing cases of these operators, or all. A record has the figures of the cases of its
    name."""
    torch.set_num_threads(1)
    used, times = defaultdict(list), {phase: defaultdict(list) for phase in FIGURES[1:]}
    for case in CASES:
        own = case.op.rpartition("::")[2]
        if names and own not in names:
            continue
        keys = [(r["name"], r["since"]) for r in records_of(case) if r["name"] == own]
        if not keys or case.call:
            continue
        share = tolerance_used(case)
        enough = all(len(times["forward"][key]) >= TIMED for key in keys)
        timed = None if enough or "float32" not in case.dtypes else bench.time_case(case, "float32", SECONDS)
        for key in keys:
            used[key].append(share)
            for phase in times if timed else ():
                if phase in timed:
                    ours, theirs = timed[phase]
                    times[phase][key].append(ours / max(theirs, 1e-6))
    found = {}
    for key, shares in used.items():
        ratios = [f"{max(times[p][key]):.1f}" if times[p][key] else NONE for p in times]
        found[key] = [f"{max(shares):.2f}" if max(shares) else "0", *ratios]
    return found


def render(figures=None, place=None):
    """The page. ``figures``: as :func:`known`. ``place``: as :func:`known_place`."""
    cases, dtypes = reached()
    figures = known() if figures is None else figures
    lines = [
        "# Operators",
        "",
        "Made by `python -m tests.ops.table` from the operator records and the case list. *Native* operators have a",
        "kernel; *composed* ones are written in terms of others when a graph is specialised. The types are those that",
        "the tests run. What PyTorch runs inside a graph is in [ops_torch.md](ops_torch.md).",
        "",
        f"Figures are of {place or known_place()}: day and CPU of the latest `python -m tests.ops.table --measure`",
        "of all operators; those of operators that came later, or changed, are of the day when that was. Tests compare",
        "the other columns with the tree, and every case with its tolerance. *Tolerance used*: the largest",
        "difference from PyTorch in results and gradients, as a share of the tolerance of the type (or of the case,",
        "where that has a wider one). *Forward*, *backward*: the engine's time divided by that of the same expression",
        "in PyTorch, float32, one thread, at large operands; of up to three cases the worst. The least of many runs,",
        "in turn. The tolerance is relative * |expected| + share * the largest element, or 1 if that is less;",
        "*tolerance used* was measured with a share of 1 instead.",
        "",
        "| type | relative | share |",
        "| --- | --- | --- |",
        *(f"| {str(d).removeprefix('torch.')} | {r:g} | {a:g} |" for d, (r, a) in OPERATOR.items()),
        "",
        "| operator | domain | since | types | gradient | runs as | cases | tolerance used | forward | backward |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in sorted(registry(), key=lambda r: (r["domain"], r["name"], r["since"])):
        key = r["name"], r["since"]
        columns = [
            r["name"],
            r["domain"] or "onnx",
            r["since"],
            ", ".join(d for d in ALL if d in dtypes[key]),
            "yes" if r["has_grad"] else "–",
            "native" if r["has_kernel"] else "composed",
            cases[key],
            *figures.get(key, [NONE] * len(FIGURES)),
        ]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from benchmarks.report import cpu

    PATH.parent.mkdir(exist_ok=True)
    measured, names = sys.argv[1:2] == ["--measure"], sys.argv[2:]
    today = f"{time.strftime('%Y-%m-%d')}, {cpu()}" if measured and not names else None
    PATH.write_text(render(known() | measure(names) if measured else None, today))
    print(f"{PATH}: {len(registry())} operators, {len(CASES)} cases")
