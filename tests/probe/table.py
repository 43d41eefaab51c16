"""Writes docs/ops_torch.md: what runs each differentiable operator of PyTorch, by type."""

import re
import textwrap
import time
from collections import Counter
from pathlib import Path

import torch

from tests.probe.trial import COARSE, DTYPES, ENTRIES, FALLBACK, FEW, names_of, supports
from tests.tolerances import FUNCTION

PATH = Path(__file__).parents[2] / "docs" / "ops_torch.md"
NEVER = "–"  # PyTorch has no gradient of it in this type
NO_REASON = "–"
INSIDE = "PyTorch runs "  # ... inside the graph
#: From run to run PyTorch runs other samples of these: a graph is compared with its module on a part of the batch, and
#: not every sample's part says the same each time.
UNSTEADY = ("_segment_reduce.lengths", "_segment_reduce.offsets", "nn.functional.embedding_bag")


def version():
    return torch.__version__.partition("+")[0]


def write(outcomes, dtype):
    """Writes the table: new cells of this type for these outcomes, the others as they were."""
    rows = {name: row for name, row in known_rows().items() if name in ENTRIES}
    for name in ENTRIES:
        rows.setdefault(name, [name, *[""] * len(DTYPES), "", ""])
        for i, kind in enumerate(DTYPES):
            if not supports(ENTRIES[name], getattr(torch, kind)):
                rows[name][1 + i] = NEVER
    for name, outcome in outcomes.items():
        row = rows[name]
        row[1 + DTYPES.index(dtype)] = cell(outcome)
        if dtype == "float32":
            row[-2:] = [share(outcome), reason(outcome)]
        elif row[-1] in ("", NO_REASON) and reason(outcome) != NO_REASON:
            row[-1] = f"{dtype}: {reason(outcome)}"
    ran = known_runs()
    if set(names_of(getattr(torch, dtype))) <= set(outcomes):
        ran[dtype] = time.strftime("%Y-%m-%d"), version()
    PATH.write_text(render(rows, ran))


def cell(outcome):
    """What runs it."""
    return "PyTorch" if outcome.state == FALLBACK else outcome.state


def share(outcome):
    """How many samples the engine ran."""
    return f"{outcome.native} of {outcome.samples}"


def reason(outcome):
    """What is wrong, or else why PyTorch ran samples, or else what it ran inside the graph."""
    found = outcome.wrong or [text for text, _ in outcome.reasons.most_common(1)]
    if outcome.inside and not found:
        found = [f"{INSIDE}{', '.join(sorted(outcome.inside))} inside the graph"]
    return found[0].replace("|", "\\|") if found else NO_REASON


def by_pytorch(name):
    """How many samples of an entry PyTorch runs in float32."""
    ours, _, all_ = known_rows()[name][-2].partition(" of ")
    return int(all_) - int(ours)


def states(dtype="float32"):
    """The committed table: what runs each entry."""
    return {name: row[1 + DTYPES.index(dtype)] for name, row in known_rows().items()}


def known_runs():
    """{type: (day, version of torch) of the latest run of all its entries}."""
    text = PATH.read_text() if PATH.exists() else ""
    found = re.findall(r"^\| (\w+) \|.* \| ([\d-]{10}) \| ([\w.]+) \|$", text, re.M)
    return {dtype: (day, of) for dtype, day, of in found if dtype in DTYPES}


def counts(rows, dtype):
    """Entries by what runs them in this type: native, mixed, PyTorch, none."""
    found = Counter(row[1 + DTYPES.index(dtype)] for row in rows.values())
    return [found[state] for state in ("native", "mixed", "PyTorch", NEVER)]


def known_rows():
    """The rows of the page by name."""
    text = PATH.read_text() if PATH.exists() else ""
    lines = text.partition("\n| operator |")[2].splitlines()[2:]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return {row[0]: row for row in rows}


def render(rows, ran):
    """The page of these rows. ``ran``: as :func:`known_runs`."""
    wider = ", ".join(f"{times} times as much for `{name}`" for name, times in sorted(COARSE.items()))
    allowed = (
        f"PyTorch computes in float64 (`tests/tolerances.py`). {wider} is allowed, if it is less than half of "
        "everything; `tests/probe/trial.py` says why."
    )
    lines = [
        "# Operators of PyTorch",
        "",
        "Made by `python -m tests.probe --write` (float32: all of PyTorch's sample inputs) and `python -m tests.probe",
        f"--few --dtype TYPE --write` (the other types: at most {FEW}): every entry of PyTorch's own list of operators",
        "that has gradients on the CPU, as a module of one operator. Results, types and gradients are PyTorch's",
        "everywhere.",
        "*native*: the engine runs all samples, by nodes of its own, composed of them, or with nodes of the graph that",
        "PyTorch runs (linear algebra, Fourier transforms and a few others; `explain` names them); *mixed*: some of",
        "them; *PyTorch*: PyTorch runs them, for the reason given; –: PyTorch has no gradient of it in this type.",
        "*Ran on* is the day on which all entries of a type ran last, and *torch* is its version then. The tests run",
        "a few of them again and compare their cells; with `--full` they run all. How many samples the engine runs",
        f"differs by a few from run to run for {', '.join(f'`{name}`' for name in UNSTEADY)}.",
        "",
        "Results agree within relative * |expected| + share * the largest element, or are as near to what",
        *textwrap.wrap(allowed, 110, break_long_words=False, break_on_hyphens=False),
        "",
        "| type | relative | share | native | mixed | PyTorch | – | all | ran on | torch |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for dtype in DTYPES:
        relative, absolute = FUNCTION[getattr(torch, dtype)]
        numbers = [f"{relative:g}", f"{absolute:g}", *map(str, counts(rows, dtype)), str(len(rows))]
        lines.append(f"| {dtype} | {' | '.join([*numbers, *ran.get(dtype, ('–', '–'))])} |")
    inside = sum(row[1] == "native" and row[-1].startswith(INSIDE) for row in rows.values())
    lines += [
        "",
        f"{inside} *native* entries of float32 have operators that PyTorch runs inside the graph; *why not* has them.",
        "",
        f"{len(rows)} entries. What they do at NaN, infinities, zeros, denormals and huge numbers is in",
        "`tests/probe/special.py`, with what is not compared there and why. Which of several equal elements `topk`,",
        "`kthvalue` and `sort` without `stable` name is not defined by PyTorch; here it is the first.",
        "At NaN the gradients of ELU, SELU and CELU are NaN, whatever an element's place; on a CPU PyTorch's are NaN",
        "in whole vectors, and the incoming gradient in what is left of a row (`tests/ops/test_nan_gradients.py`).",
        "",
        f"| operator | {' | '.join(DTYPES)} | samples by the engine (float32) | why not |",
        "| --- " * (len(DTYPES) + 3) + "|",
        *("| " + " | ".join(rows[name]) + " |" for name in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"
