"""The documentation site: it is built without a warning, each link within it leads somewhere, and it has every page."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", folder / "pages"]
    network = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}  # there is none
    done = subprocess.run(
        [*command, ROOT / "docs", folder / "html"],
        env=os.environ | network, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_links_lead_somewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if ":" in target or target.startswith("//"):
                continue
            place = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            assert place.exists(), f"{path.name}: {link}"
            if anchor and place in pages and place.name != "search.html":
                assert unquote(anchor) in pages[place].anchors, f"{path.name}: {link}"


def test_every_page_is_there(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists(), page
    for name, sentence in (("start", "Two commands"), ("contributing", "Add a pass"), ("changelog", "Unreleased")):
        assert sentence in (site / f"{name}.html").read_text()


def test_the_reference_has_everything_public(site):
    import ortmodule
    import ortmodule.optim

    anchors = Page(site / "api.html").anchors
    names = {f"ortmodule.{name}" for name in ortmodule.__all__ if name not in ("__version__", "memory", "patterns")}
    names |= {f"ortmodule.optim.{name}" for name in ortmodule.optim.__all__ if name != "lr_scheduler"}
    kinds = ("Constant", "Linear", "Cosine", "Poly")
    names |= {f"ortmodule.optim.lr_scheduler.{kind}WarmupLRScheduler" for kind in kinds}
    names |= {f"ortmodule.memory.{name}" for name in ("predict", "largest_batch", "pareto", "Peak")}
    names |= {f"ortmodule.patterns.{name}" for name in ("register", "unregister", "registered")}
    found = {anchor.replace("ortmodule.capture.patterns", "ortmodule.patterns") for anchor in anchors}
    missing = names - found
    assert not missing


def test_examples_in_docstrings_are_code(site):
    """What is indented in a docstring is text that is quoted, unless two colons stand before it."""
    page = (site / "api.html").read_text()
    assert "ModuleWithLoss" in page and "<pre>" in page
    assert "<blockquote" not in page
