"""docs/models.md: what became of every model."""

from collections import Counter
from pathlib import Path

from tests.models.trial import DOUBLE, MAGNIFIED, RIGHT, UNBUILT, WRONG

PATH = Path(__file__).parents[2] / "docs" / "models.md"
GROUPS = ("transformers", "torch.nn", "classics")
HEADING = "## Not settled"
NOT_SETTLED = (
    "No small configuration or batch is found for these, or they took too long, or they differ: none is counted above."
)
ENGINE, PYTORCH = "engine", "PyTorch"


def write(outcomes, names):
    """Writes the table of ``names``: new rows for these outcomes, the others as they were."""
    rows = {name: row for name, row in _rows().items() if name in names}
    rows |= {name: _row(outcome) for name, outcome in outcomes.items()}
    PATH.write_text(_render({name: rows[name] for name in names if name in rows}))


def states():
    """The committed table: {name: (state, what ran it)}."""
    return {name: (row[1], row[2]) for name, row in _rows().items() if row[1] != UNBUILT}


def _rows():
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    cells = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines if line.startswith("| ")]
    rows = {row[0]: row for row in cells if len(row) == 9 and row[0] not in ("model", "---")}
    if HEADING in lines:
        listed = [line.removeprefix("- ").partition(": ") for line in lines[lines.index(HEADING) :] if line[:2] == "- "]
        rows |= {name: [name, UNBUILT, *["–"] * 6, reason] for name, _, reason in listed}
    return rows


def _row(outcome):
    name, state, reason = outcome.name, outcome.state, outcome.reason.replace("|", "/") or "–"
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


def _render(rows):
    built = {name: row for name, row in rows.items() if row[1] != UNBUILT}
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
        *(_summary(group, {n: r for n, r in built.items() if _group(n) == group}) for group in GROUPS),
    ]
    head = ["model", "agrees", "run by", "loss", "gradients", "exports", "nodes", "through PyTorch", "why not"]
    for group in GROUPS:
        lines += ["", f"## {group}", "", _line(head), _line(["---"] * len(head))]
        lines += [_line(row) for name, row in built.items() if _group(name) == group]
    lines += ["", HEADING, "", NOT_SETTLED, ""]
    lines += [f"- {name}: {row[8]}" for name, row in rows.items() if row[1] == UNBUILT]
    return "\n".join(lines) + "\n"


def _summary(group, rows):
    counts = Counter((row[1].partition(", ")[0], row[2]) for row in rows.values())
    engine = sum(n for (_, ran), n in counts.items() if ran == ENGINE)
    right = sum(n for (state, _), n in counts.items() if state != WRONG)
    parts = sum(row[2] == ENGINE and row[7] != "–" for row in rows.values())
    text = f"- {group}: {len(rows)} tried, {right} right, {engine} run by the engine ({parts} of them with parts that"
    return f"{text} PyTorch runs), {len(rows) - engine} by PyTorch"
