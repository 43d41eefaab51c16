"""Writes the table of passes: ``python -m scripts.passes_page docs/passes.md``.

A row that is there keeps what it says of its pass and which tests it names; the place of a row, and when its pass runs,
come from the engine and its sources. A pass without a row gets one, with the first line of its file and its tests.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ortmodule import _core

ROOT = Path(__file__).resolve().parents[1]
STAGES = {"WHILE_EMITTED": "always", "BEFORE_GRADIENT": "before", "AFTER_GRADIENT": "after", "LAST": "last"}
_HEAD = "| pass | what becomes what | runs | text | numbers |\n| --- | --- | --- | --- | --- |\n"
_ROW = re.compile(r"^\| `(\w+)` \| (.*) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|\n", re.M)


def page(text: str) -> str:
    """The page, from the one that there is."""
    before, head, rest = text.partition(_HEAD)
    if not head:
        raise ValueError(f"the page has no table that begins with {_HEAD.splitlines()[0]}")
    known = {}
    while found := _ROW.match(rest):
        known[found[1]] = found.groups()
        rest = rest[found.end() :]
    rows = [_row(name, known.get(name)) for name in _core.passes()]
    return before + head + "".join(rows) + rest


def _row(name: str, known: tuple[str, ...] | None) -> str:
    sources = [file.read_text() for file in sorted((ROOT / "csrc" / "passes").glob("*.c"))]
    (source,) = [text for text in sources if f"const pass_def {name} =" in text]
    record = source.partition(f"const pass_def {name} =")[2].partition("};")[0]
    stages = re.search(r"\.stage = ([A-Z_| ]+)", record)
    if stages is None:
        raise ValueError(f"the record of {name} does not say when it runs")
    runs = ", ".join(STAGES[stage] for stage in stages[1].strip().split(" | "))
    _, what, _, text, numbers = known or ("", _first_line(source), "", _tests("c", name), _tests("passes", name))
    return f"| `{name}` | {what} | {runs} | {text} | {numbers} |\n"


def _first_line(source: str) -> str:
    return re.sub(r"\s+", " ", source.partition(" -- ")[2].partition("*/")[0]).strip().replace("->", "→")


def _tests(folder: str, name: str) -> str:
    files = sorted((ROOT / "tests" / folder).glob("test_*.*"))
    return ", ".join(f"`{file.name}`" for file in files if f'"{name}"' in file.read_text())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
