"""docs/ops_torch.md: what runs each differentiable operator of PyTorch, by type."""

from collections import Counter
from pathlib import Path

import torch

from tests.probe.trial import COARSE, DTYPES, ENTRIES, FALLBACK, supports
from tests.tolerances import FUNCTION

PATH = Path(__file__).parents[2] / "docs" / "ops_torch.md"
NEVER = "–"  # PyTorch has no gradient of it in this type


def write(outcomes, dtype):
    """Writes the table: new cells of this type for these outcomes, the others as they were."""
    rows = {name: row for name, row in _rows().items() if name in ENTRIES}
    for name in ENTRIES:
        rows.setdefault(name, [name, *[""] * len(DTYPES), "", ""])
        for i, kind in enumerate(DTYPES):
            if not supports(ENTRIES[name], getattr(torch, kind)):
                rows[name][1 + i] = NEVER
    for name, outcome in outcomes.items():
        row = rows[name]
        row[1 + DTYPES.index(dtype)] = "PyTorch" if outcome.state == FALLBACK else outcome.state
        if dtype == "float32":
            row[-2] = f"{outcome.native} of {outcome.samples}"
        reason = outcome.wrong or [reason for reason, _ in outcome.reasons.most_common(1)]
        if outcome.inside and not reason:
            reason = [f"PyTorch runs {', '.join(sorted(outcome.inside))} inside the graph"]
        if reason or dtype == "float32":
            row[-1] = reason[0].replace("|", "\\|") if reason else "–"
    PATH.write_text(_render(rows))


def by_pytorch(name):
    """How many samples of an entry PyTorch runs in float32."""
    ours, _, all_ = _rows()[name][-2].partition(" of ")
    return int(all_) - int(ours)


def _coarse():
    texts = [f"`{name}` ({times} times)" for name, times in COARSE.items()]
    return ", ".join(texts[:2]), ", ".join(texts[2:])


def states(dtype="float32"):
    """The committed table: what runs each entry."""
    return {name: row[1 + DTYPES.index(dtype)] for name, row in _rows().items()}


def _rows():
    text = PATH.read_text() if PATH.exists() else ""
    lines = text.partition("\n| operator |")[2].splitlines()[2:]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return {row[0]: row for row in rows}


def _render(rows):
    lines = [
        "# Operators of PyTorch",
        "",
        "Made by `python -m tests.probe --write` (float32: all of PyTorch's sample inputs) and `python -m tests.probe",
        "--few --dtype TYPE --write` (the other types: at most 6): every entry of PyTorch's own list of operators that",
        "has gradients on the CPU, as a module of one operator. Results, types and gradients are PyTorch's everywhere.",
        "*native*: the engine runs all samples, by nodes of its own, composed of them, or with nodes of the graph that",
        "PyTorch runs (linear algebra, Fourier transforms and a few others; `explain` names them); *mixed*: some of",
        "them; *PyTorch*: PyTorch runs them, for the reason given; –: PyTorch has no gradient of it in this type.",
        "",
        "Results agree within relative * |expected| + share * the largest element, or are as near to what PyTorch",
        "computes in float64 (`tests/tolerances.py`); these within several times that, if it is less than half of",
        f"everything, for the reasons in `tests/probe/trial.py`: {_coarse()[0]},",
        f"{_coarse()[1]}:",
        "",
        "| type | relative | share | native | mixed | PyTorch | – |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for i, dtype in enumerate(DTYPES):
        counts = Counter(row[1 + i] for row in rows.values())
        relative, absolute = FUNCTION[getattr(torch, dtype)]
        numbers = " | ".join(str(counts[state]) for state in ("native", "mixed", "PyTorch", NEVER))
        lines.append(f"| {dtype} | {relative:g} | {absolute:g} | {numbers} |")
    lines += [
        "",
        f"{len(rows)} entries. What they do at NaN, infinities, zeros, denormals and huge numbers is in",
        "`tests/probe/special.py`, with what is not compared there and why. Which of several equal elements `topk`,",
        "`kthvalue` and `sort` without `stable` name is not defined by PyTorch; here it is the first.",
        "",
        f"| operator | {' | '.join(DTYPES)} | samples by the engine | why not |",
        "| --- " * (len(DTYPES) + 3) + "|",
        *("| " + " | ".join(rows[name]) + " |" for name in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"
