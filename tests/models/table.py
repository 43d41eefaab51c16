"""Writes docs/models.md: what became of every model."""

import re
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.models.trial import DOUBLE, MAGNIFIED, RIGHT, UNBUILT, WRONG

PATH = Path(__file__).parents[2] / "docs" / "models.md"
GROUPS = ("transformers", "torch.nn", "classics")
HEADING = "## Not settled"
NOT_SETTLED = (
    "No small configuration or batch was found for these, or comparing them took too long, or they draw numbers that",
    "cannot be drawn again. They are counted in the column of this name above, and nowhere else.",
)
ENGINE, PYTORCH = "engine", "PyTorch"
COLUMNS = ("model", "agrees", "run by", "loss", "gradients", "exports", "nodes", "through PyTorch", "why not", "ran on")
#: Cells that depend on the CPU, or on the day: a test compares the others.
OF_A_CPU = ("loss", "gradients", "nodes", "ran on")
COUNTED = (
    "all", "compared", "right", "right in float64", "wrong", "not settled", "by the engine alone",
    "by the engine, with parts through PyTorch", "by PyTorch",
)  # fmt: skip


def versions():
    """Of what the models come from, as the page has it."""
    return f"torch {torch.__version__.partition('+')[0]} and transformers {transformers.__version__}"


def known_versions():
    """Those of the page's latest rows."""
    found = re.search(r"The latest rows ran with (.*?)\.$", PATH.read_text(), re.M) if PATH.exists() else None
    return found[1] if found else "unknown versions"


def write(outcomes, names):
    """Writes the table of ``names``: new rows for these outcomes, the others as they were.

    A row that was compared where a library (timm) was installed stays, with its day, where the library is missing.
    """
    rows = {name: row for name, row in known_rows().items() if name in names}
    for name, outcome in outcomes.items():
        missing = outcome.state == UNBUILT and outcome.reason.startswith("ImportError")
        if not missing or name not in rows or rows[name][1] == UNBUILT:
            rows[name] = row_of(outcome)
    ordered = {name: rows[name] for name in names if name in rows}
    PATH.write_text(render(ordered, versions() if outcomes else known_versions()))


def states():
    """The committed table: {name: (state, what ran it)}."""
    return {name: (row[1], row[2]) for name, row in known_rows().items() if row[1] != UNBUILT}


def known_rows():
    """The rows of the page by name, those that are not settled, too."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines if line.startswith("| ")]
    rows = {row[0]: row for row in cells if len(row) == len(COLUMNS) and re.fullmatch(r"[\d-]{10}", row[-1])}
    if HEADING in lines:
        for line in lines[lines.index(HEADING) :]:
            if found := re.fullmatch(r"- (\S+) \(([\d-]+)\): (.*)", line):
                rows[found[1]] = [found[1], UNBUILT, *["–"] * 6, found[3], found[2]]
    return rows


def comparable(row):
    """The cells that depend on neither CPU nor day, by column. Rounding decides which kind of *right* it is."""
    cells = {column: cell for column, cell in zip(COLUMNS, row, strict=True) if column not in OF_A_CPU}
    return cells | {"agrees": cells["agrees"].replace(DOUBLE, RIGHT)}


def row_of(outcome):
    """The cells of an outcome of today."""
    return [*_cells(outcome), time.strftime("%Y-%m-%d")]


def _cells(outcome):
    name, state = outcome.name, outcome.state
    reason = outcome.reason.replace("|", "/").strip() or "–"
    if state == UNBUILT:
        return [name, state, "–", "–", "–", "–", "–", "–", reason]
    ran = ENGINE if outcome.captured else PYTORCH
    state = state if outcome.mode == "train" else f"{state}, {outcome.mode}"
    figures = [f"{outcome.loss_off:.0e}", f"{outcome.grad_off:.0e}"] if outcome.state in (RIGHT, DOUBLE) else ["–", "–"]
    figures = ["–" if figure == "nan" else figure for figure in figures]
    counts = [str(outcome.exports), str(outcome.nodes)] if outcome.captured else ["–", "–"]
    return [name, state, ran, *figures, *counts, ", ".join(outcome.outside) or "–", reason]


def _group(name):
    from tests.models.classics import CLASSICS

    return GROUPS[1] if name.startswith("nn.") else GROUPS[2] if name in CLASSICS else GROUPS[0]


def _line(cells):
    return "| " + " | ".join(cells) + " |"


def counts(rows):
    """How many of these rows are in each column of the page's first table."""
    states = Counter(row[1].partition(", ")[0] for row in rows)
    compared = [row for row in rows if row[1] != UNBUILT]
    parts = sum(row[2] == ENGINE and row[7] != "–" for row in compared)
    engine = sum(row[2] == ENGINE for row in compared)
    found = [states[RIGHT], states[DOUBLE], states[WRONG], states[UNBUILT]]
    return [len(rows), len(compared), *found, engine - parts, parts, len(compared) - engine]


def render(rows, with_versions):
    """The page of these rows; ``with_versions``: of the libraries that the latest of them ran with."""
    built = {name: row for name, row in rows.items() if row[1] != UNBUILT}
    groups = {group: [row for name, row in rows.items() if _group(name) == group] for group in GROUPS}
    lines = [
        "# Models",
        "",
        "Made by `python -m tests.models --write`: every family of transformers, from its own configuration with",
        "the sizes in it shrunk, every class of torch.nn, and some classics. Each trains for three steps on",
        "batches of two sizes, in PyTorch and in the engine. *right*: results, losses and all gradients are",
        "PyTorch's; *right in float64*: rounding is magnified, float64 agrees, and in float32 the engine is no more",
        f"than {MAGNIFIED} times as far from float64 as PyTorch, which starts from these parameters or from some a",
        "rounding beside; *eval*: it draws random numbers in training and is compared in eval mode, with gradients;",
        "*verified*: it always draws some, and `ORTMODULE_VERIFY` compares it. The figures are the largest deviations",
        "of the loss and of a gradient. *nodes* are the instructions of a step. *Through PyTorch* are the operators,",
        "functions and submodules that PyTorch runs inside the graph; where it runs the module, the reason is given.",
        "Families with backbones of timm are tried where timm is installed.",
        "",
        "*ran on* is the day on which a row was compared last. The tests compare a few rows again, and every row with",
        f"`--full`: all cells but {', '.join(OF_A_CPU[:-1])}, which depend on the CPU.",
        f"The latest rows ran with {with_versions}.",
        "",
        _line(["", *COUNTED]),
        _line(["---"] + ["---:"] * len(COUNTED)),
        *(_line([group, *map(str, counts(of))]) for group, of in groups.items()),
        _line(["together", *map(str, counts(list(rows.values())))]),
    ]
    for group in GROUPS:
        lines += ["", f"## {group}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(row) for name, row in built.items() if _group(name) == group]
    lines += ["", HEADING, "", *NOT_SETTLED, ""]
    lines += [f"- {name} ({row[9]}): {row[8]}" for name, row in rows.items() if row[1] == UNBUILT]
    return "\n".join(lines) + "\n"
