"""Settings of the documentation site: ``scripts/docs`` builds it from these pages and the public docstrings."""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import ortmodule  # noqa: E402

project = "ortmodule"
author = "the ortmodule developers"
project_copyright = author
version = release = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["requirements.txt"]
default_role = "code"  # `name` in docstrings
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"ortmodule {version}"
html_show_sourcelink = False
html_copy_source = False

#: Pages that are files of the tree's root; the file in docs/ of that name only says so.
OF_THE_ROOT = {
    "start": "README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
    "security": "SECURITY.md",
}
PLACES = {name: page for page, name in OF_THE_ROOT.items()}
LINK = re.compile(r"\[([^\]\n]+)\]\((?!https?:|#)([^)\s]+)\)")


def read(app: object, page: str, source: list[str]) -> None:
    """Puts a file of the root into its page, and turns links within the tree into links within the site."""
    if page in OF_THE_ROOT:
        source[0] = (ROOT / OF_THE_ROOT[page]).read_text()
    here = (DOCS / page).parent
    folder = ROOT if page in OF_THE_ROOT else here
    source[0] = LINK.sub(lambda link: linked(link[1], link[2], folder, here), source[0])


def linked(text: str, target: str, folder: Path, here: Path) -> str:
    """A link to a page of the site; of a file that is none, its path. ``folder``: where the page is written, ``here``:
    where it is in the site."""
    path, _, anchor = target.partition("#")
    path = (folder / path).resolve()
    if path.is_relative_to(DOCS) and path.suffix == ".md":
        return f"[{text}]({os.path.relpath(path, here)}{'#' * bool(anchor)}{anchor})"
    if path.parent == ROOT and path.name in PLACES:
        return f"[{text}]({os.path.relpath(DOCS / PLACES[path.name], here)}.md)"
    if path.parent == ROOT and path.name == "LICENSE":
        return text
    assert path.exists(), f"{target} is not there"
    name = str(path.relative_to(ROOT))
    return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"


def whole(app: object, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in the first line for the type of an attribute: that line is empty."""
    if what == "attribute" and lines:
        lines.insert(0, "\\ ")


def setup(app) -> None:
    assert Path(ortmodule.__file__).is_relative_to(ROOT), "another ortmodule is documented"
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", whole, priority=100)
