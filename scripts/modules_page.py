"""Writes the list of Python modules: ``python -m scripts.modules_page docs/modules.md``."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Packages in the order in which they may import each other: a later one imports earlier ones.
PACKAGES = (
    "core",
    "triton_kernels",
    "guards",
    "host",
    "lowering",
    "engine",
    "capture",
    "runtime",
    "debug",
    "utils",
    "trainer",
    "compat",
)
_HEAD = """# Modules of the package

What each module is for, as its first line says it. Packages come in the order of imports: a package imports those
above it. The root, `ortmodule/`, imports all of them. How they work together is in [architecture](architecture.md).

Written by `python -m scripts.modules_page docs/modules.md`.
"""


def page() -> str:
    """The page, from the modules' docstrings."""
    package = ROOT / "ortmodule"
    parts = [_table("ortmodule", package, "*.py")]
    parts += [_table(f"ortmodule.{name}", package / name, "**/*.py") for name in PACKAGES]
    return _HEAD + "".join(parts) + _table("ortmodule.optim (the folder `optim/`)", ROOT / "optim", "*.py")


def _table(title: str, folder: Path, pattern: str) -> str:
    rows = {file.relative_to(folder).as_posix(): _first_line(file) for file in sorted(folder.glob(pattern))}
    about = rows.pop("__init__.py")
    rows = {name: what for name, what in rows.items() if not name.startswith("packages/")}
    if folder.name == "compat":
        rows["packages/"] = "Holds packages under the names of ONNX Runtime, torch_ort and Optimum; each names ours."
    lines = [f"| `{name}` | {what} |\n" for name, what in rows.items() if what]
    return f"\n## {title}\n\n{about}\n\n| module | what it does |\n| --- | --- |\n" + "".join(lines)


def _first_line(file: Path) -> str:
    """The first paragraph of a module's docstring, up to the end of its first sentence."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    text = re.sub(r"\s+", " ", text.partition("\n\n")[0]).replace("``", "`").replace("|", "\\|")
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].strip().rstrip(":")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
