"""Holds the written pages against the tree: figures that stand in two pages, names of files and modules."""

import re
from pathlib import Path

import pytest

from scripts import modules_page

ROOT = Path(__file__).resolve().parents[2]
README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
EXPLAIN = [ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "architecture").glob("*.md"))]


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(text):
    """[(the paragraph before it, its rows as {heading: cell})] of every table, in order."""
    found = []
    for part in re.finditer(r"((?:^(?!\|).+\n)+)\n((?:^\|.*\n)+)", text + "\n", re.M):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in part[2].splitlines()]
        found.append((" ".join(part[1].split()), [dict(zip(head, row, strict=True)) for row in rows]))
    return found


#: A column of README's table: how the paragraph before its table in docs/benchmarks.md begins.
MEASURED = {
    "Zen 5, float32": "AMD EPYC (Zen 5: AVX-512, no AMX), 2 threads; ",
    "Zen 5, bfloat16": "On a CPU with AVX512-BF16 and no AMX (a Zen 5 like the first table's, ",
    "Xeon, float32": "On a CPU with AMX MKL takes AVX-512; ",
    "Xeon, bfloat16": "On a CPU with AMX (Intel Xeon, 2 threads, ",
    "Zen 4, float32": "AMD EPYC (family 25, model 17), ",
    "Zen 4, bfloat16": "bfloat16 autocast, in the same session, ",
}


def speeds(begins):
    """(day, {model: "ours (torch.compile's)"}) of the table whose paragraph begins so."""
    (paragraph, rows), *more = [table for table in tables(BENCHMARKS.read_text()) if table[0].startswith(begins)]
    assert not more and len({row["model"] for row in rows}) == 10
    of = {(row["model"], row["backend"]): row["speed"].partition("×")[0] for row in rows}
    days = re.findall(r"\d{4}-\d\d-\d\d", paragraph)
    assert len(days) == 1
    return days[0], {model: f"{of[model, 'ortmodule']} ({of[model, 'compile']})" for model, _ in of}


def test_speeds_of_the_readme():
    """Every one is that of docs/benchmarks.md, and the days on which they were measured are named."""
    (paragraph, rows), *_ = [table for table in tables(README.read_text()) if set(MEASURED) < set(table[1][0])]
    for column, begins in MEASURED.items():
        day, figures = speeds(begins)
        assert {row["model"]: row[column] for row in rows} == figures, column
        kind, dtype = column.split(", ")
        assert re.search(rf"{kind}[^.;]*{dtype} {day}", paragraph), f"{column} is of {day}"


def test_a_figure_that_was_changed_is_found(monkeypatch, tmp_path):
    changed = tmp_path / "benchmarks.md"
    text = BENCHMARKS.read_text()
    assert "| MiniLM classifier, 32×48 | ortmodule | 125 ±13 | 5.56×" in text
    changed.write_text(text.replace("| ortmodule | 125 ±13 | 5.56×", "| ortmodule | 125 ±13 | 5.57×"))
    monkeypatch.setitem(globals(), "BENCHMARKS", changed)
    with pytest.raises(AssertionError, match="Zen 5, float32"):
        test_speeds_of_the_readme()


def test_families_of_the_readme():
    """As many as docs/models.md counts."""
    every = [row for _, rows in tables((ROOT / "docs" / "models.md").read_text()) for row in rows]
    row = next(row for row in every if row.get("") == "transformers")
    sentence = (
        f"compares {row['compared']} of transformers' {row['all']} families; {row['not settled']} are not settled"
    )
    assert sentence in " ".join(README.read_text().split())


# --- modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [README, ROOT / "examples" / "recipes" / "README.md"], ids=lambda page: page.parent.name
)
def test_the_tables_of_recipes(page):
    """Each recipe has its row."""
    if not page.exists():
        pytest.skip("the examples are not there")
    text = page.read_text()
    files = {path.stem for path in (ROOT / "examples" / "recipes").glob("*.py")} - {"__init__", "shared"}
    listed = re.findall(r"^\|.*(?:examples\.recipes\.|\[)(\w+)(?:`|\]\(\1\.py\))", text, re.M)
    assert len(files) > 10 and sorted(listed) == sorted(files)


def test_the_list_of_modules():
    page = ROOT / "docs" / "modules.md"
    assert page.read_text() == modules_page.page(), "run: python -m scripts.modules_page docs/modules.md"


# --- names ------------------------------------------------------------------------------------------------------------

FOLDERS = ("csrc", "ortmodule", "optim", "tests", "benchmarks", "examples", "scripts", "docs")
SOURCES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")} | {p.name for p in ROOT.iterdir()}
#: Files of others, and files that are made when something runs.
OTHERS = {"tuning_results.json", "report.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name(page):
    """`file.c`, `folder/file.py` and links lead to something in the tree."""
    text = page.read_text()
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    whole = page in EXPLAIN or page.name in ("passes.md", "glossary.md")
    for name in re.findall(r"`([\w/.-]+\.(?:c|h|cu|py|md|json|toml))`", text if whole else prose):
        assert is_there(name), name
    for module in re.findall(r"`((?:ortmodule|optim)(?:\.\w+)+)`", text):
        assert is_module(module), module
    for target in re.findall(r"\]\(([\w/.-]+)\)", text):
        assert (page.parent / target).exists(), target


def is_there(name: str) -> bool:
    """A file of the tree, named by the end of its path: `runtime/dispatcher.py`. In `csrc/` a folder between those that
    are named may be left out: `ops/fused.c`."""
    *folders, file = name.split("/")
    if not folders:
        return file in SOURCES | OTHERS
    if folders[0] in FOLDERS and not name.endswith((".c", ".h", ".cu")):
        return (ROOT / name).exists()
    paths = [path.relative_to(ROOT).parts for folder in FOLDERS for path in (ROOT / folder).rglob(file)]
    if name.endswith((".c", ".h", ".cu")):
        return any(folders == [part for part in path[:-1] if part in folders] for path in paths)
    return any(list(path[-len(folders) - 1 :]) == [*folders, file] for path in paths)


def is_module(name: str) -> bool:
    """A module or a package of ours, or a name in one."""
    first, *rest = name.removeprefix("ortmodule.optim").removeprefix("ortmodule").lstrip(".").split(".")
    folder = ROOT / ("optim" if name.startswith(("ortmodule.optim", "optim")) else "ortmodule")
    path = folder / first
    if not path.is_dir():
        return path.with_suffix(".py").exists() or first in (folder / "__init__.py").read_text() or first == "_core"
    return not rest or (path / rest[0]).is_dir() or (path / f"{rest[0]}.py").exists()


def test_a_file_that_is_not_there_is_found():
    assert is_there("runtime/dispatcher.py") and is_there("ops/chains/fused.c") and is_there("csrc/graph/build.c")
    assert not is_there("capture/dispatcher.py") and not is_there("plan/fused.c") and not is_there("reads.py")
    assert is_module("ortmodule.runtime.dispatcher") and is_module("ortmodule.optim") and is_module("ortmodule.explain")
    assert not is_module("ortmodule.runtime.runner") and not is_module("ortmodule.runner")


# --- the architecture and the glossary --------------------------------------------------------------------------------

MOST_WORDS = 1200


@pytest.mark.parametrize("page", EXPLAIN, ids=lambda page: page.name)
def test_pages_of_the_architecture_are_short(page):
    assert len(page.read_text().split()) <= MOST_WORDS


def test_the_overview_names_every_page():
    overview, *pages = EXPLAIN
    assert pages and all(f"(architecture/{page.name})" in overview.read_text() for page in pages)


def test_the_overview_has_one_picture():
    text = EXPLAIN[0].read_text().partition("## The tree")[0]
    assert text.count("```") == 2


def test_glossary():
    """Every term stands once, with a sentence or two, and at a place that exists (test_files_that_pages_name)."""
    rows = [row for _, rows in glossary() for row in rows]
    terms = [term.strip() for row in rows for term in row["term"].split(",")]
    assert len(rows) >= 60 and len(terms) == len(set(terms))
    for row in rows:
        assert row["meaning"].endswith(".") and row["meaning"].count(". ") <= 2, row["term"]
        for package in re.findall(r"`((?:csrc|ortmodule)/[\w/]*/)`", row["where"]):
            assert (ROOT / package).is_dir(), package


def glossary():
    found = tables((ROOT / "docs" / "glossary.md").read_text())
    assert all(set(row) == {"term", "meaning", "where"} for _, rows in found for row in rows)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_pages_name(page):
    """`python -m module` is a module of the tree."""
    for module in re.findall(r"python -m ((?:benchmarks|tests|examples|ortmodule)[\w.]*)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
