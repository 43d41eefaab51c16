"""docs/ops_torch.md: what runs each differentiable operator of PyTorch."""

from collections import Counter
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "ops_torch.md"


def write(outcomes, names):
    """Writes the table of ``names``: new rows for these outcomes, the others as they were."""
    rows = {name: row for name, row in _rows().items() if name in names}
    rows |= {name: _row(outcome) for name, outcome in outcomes.items()}
    PATH.write_text(_render(rows))


def states():
    """The committed table: what runs each entry."""
    return {name: row.split(" | ")[1] for name, row in _rows().items()}


def _rows():
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    rows = [line for line in lines if line.startswith("| ")][2:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def _row(outcome):
    reason = outcome.wrong or [reason for reason, _ in outcome.reasons.most_common(1)] or ["–"]
    cell = reason[0].replace("|", "\\|")
    return f"| {outcome.name} | {outcome.state} | {outcome.native} of {outcome.samples} | {cell} |"


def _render(rows):
    counts = Counter(row.split(" | ")[1] for row in rows.values())
    lines = [
        "# Operators of PyTorch",
        "",
        "Made by `python -m tests.probe --few --write`: every entry of PyTorch's own list of operators that has",
        "gradients on the CPU, on some of PyTorch's sample inputs in float32, as a module of one operator. Results,",
        "types and gradients are PyTorch's in every row. *native*: the engine runs all samples, by nodes of its own or",
        "composed of them; *mixed*: some of them; *fallback*: PyTorch runs them, for the reason given.",
        "",
        f"{len(rows)} entries: " + ", ".join(f"{n} {state}" for state, n in sorted(counts.items())) + ".",
        "",
        "| operator | runs as | samples by the engine | why not |",
        "| --- | --- | --- | --- |",
        *(rows[name] for name in sorted(rows)),
    ]
    return "\n".join(lines) + "\n"
