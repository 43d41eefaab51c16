"""The page that report() writes: all in one file, true to the plan, and without an error in a browser."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import ortmodule
from ortmodule import Config, ORTModule, memory
from ortmodule.debug.plots import plan_figure
from tests.debug.test_profile import Model, batch, step
from tests.selection import each

#: Another name of the file in other distributions.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IDS, LABELS = batch()


class Page(HTMLParser):
    """What a page refers to, and its text by sections."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.refers, self.loads, self.texts, self.section, self.inside = [], [], [], {}, "", []
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        if tag == "a" and given.get("href", "").startswith("#"):
            self.refers.append(given["href"][1:])
        elif "src" in given or "href" in given:
            self.loads.append((tag, given))
        self.section = given["id"] if tag == "section" else self.section
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.handle_data(" ")
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside):
            self.texts[self.section] = self.texts.get(self.section, "") + data

    def figures(self):
        return {f["id"]: f for f in json.loads(re.search(r"^const figures = (.*);$", self.source, re.M)[1])}


@pytest.fixture
def libraries():
    pytest.importorskip("plotly")
    pytest.importorskip("jinja2")


@pytest.fixture
def written(libraries, tmp_path):
    """(model, profile, path) of a page with all there is."""
    model = ORTModule(Model(), config=Config(memory_opt_level=2))
    step(model)
    with ortmodule.profile(model) as measured:
        step(model)
    prices = [memory.Price(4 << 20, 0.0), memory.Price(3 << 20, 0.25)]
    path = ortmodule.report(model, tmp_path / "page.html", (IDS, LABELS), profile=measured, prices=prices)
    return model, measured, path


def plan_of(model):
    (plan,) = [plan for plan in model._ortmodule.latest.session.plans.values() if not plan.prologue]
    return plan


def test_a_page_is_one_file_and_says_what_there_is(written):
    model, measured, path = written
    page, plan = Page(path), plan_of(model)
    assert not page.loads and len(page.ids) == len(set(page.ids)) and set(page.refers) <= set(page.ids)
    assert set(page.texts) >= {"summary", "graph", "memory", "time", "inputs", "variants", "budgets"}
    graph = page.texts["graph"]
    for mark in ("fused", "recomputed", "island", "view", "removed"):
        assert re.search(rf"\d+ {mark}|{mark}\s*\w*\s*[\d.]+ ms|{mark}", graph), mark
    assert re.search(r"\d+ recomputed", graph) and "PythonOp" in graph and "HostCall" in graph and "layers" in graph
    assert graph.count("Embedding") >= 2  # before and after
    assert "words" in page.texts["time"] and "gelu_fusion" in page.texts["time"] and "1 step was" in page.texts["time"]
    inputs = " ".join(page.texts["inputs"].split())
    assert "ids tokens 0 23 24 95.8 %" in inputs and "labels labels -100 23 24 95.8 %" in inputs
    assert "its first call" in page.texts["variants"]
    assert "25.0 %" in page.texts["budgets"]
    figures = page.figures()
    assert figures.keys() == {"plan0", "time", "pareto"}
    bars = [trace for trace in figures["plan0"]["data"] if trace["type"] == "bar"]
    assert sum(len(trace["x"]) for trace in bars) == len(plan.blocks())
    total = sum(figures["time"]["data"][0]["values"][:1])
    assert total == pytest.approx(1e9 * measured.seconds, rel=1e-3, abs=1e3)
    assert figures["pareto"]["data"][0]["y"][1] == pytest.approx(1.25e3 * measured.seconds)


def test_the_picture_is_the_plan():
    model = ORTModule(Model())
    step(model)
    plan = plan_of(model)
    figure = plan_figure(plan, "plan")
    at, most = plan.peak()
    scale, alive = 1 << 10, 0
    assert "KiB" in figure.layout["yaxis"]["title"]["text"]
    for trace in figure.data:
        if trace["type"] != "bar":
            continue
        for x, width, base, size in zip(trace["x"], trace["width"], trace["base"], trace["y"], strict=True):
            assert base >= 0 and (base + size) * scale <= plan.arena_bytes
            if x - width / 2 < at < x + width / 2:
                alive += round(size * scale)
    (line,) = [trace for trace in figure.data if trace["type"] == "scatter"]
    assert alive == most == round(max(line["y"]) * scale) and line["y"].index(max(line["y"])) == at


def test_before_a_step_and_without_anything(libraries, tmp_path):
    model = ORTModule(Model().requires_grad_(False))
    with pytest.raises(ValueError, match="no step has run yet: give report.. a sample"):
        ortmodule.report(model, tmp_path / "page.html")
    ortmodule.report(ORTModule(nn.Linear(4, 3)), tmp_path / "page.html", torch.ones(2, 4))
    page = Page(tmp_path / "page.html")
    assert "peak of a step" in page.texts["summary"] and "with ortmodule.profile(model)" in page.texts["time"]
    assert "known to have padding" in page.texts["inputs"] and "memory.pareto" in page.texts["budgets"]
    with pytest.raises(TypeError, match="report.. wants an ORTModule, not Linear"):
        ortmodule.report(nn.Linear(4, 3), tmp_path / "page.html")


def test_where_pytorch_runs_the_module(libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    model = ORTModule(nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="PyTorch runs"):
        model(torch.ones(2, 4))
    ortmodule.report(model, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "There is no graph" in page.texts["graph"] and "FALLBACK_FORCE_TORCH_FORWARD" in page.source


def test_names_are_text(libraries, tmp_path):
    """A submodule may have any name, also one that a page could take for its own."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("</script><b>&", nn.Linear(4, 3))

        def forward(self, x):
            return self.get_submodule("</script><b>&")(x)

    model = ORTModule(Odd())
    with ortmodule.profile(model) as measured:
        model(torch.ones(2, 4)).sum().backward()
    ortmodule.report(model, tmp_path / "page.html", profile=measured)
    page = Page(tmp_path / "page.html")
    assert page.source.count("</script>") == 2 and "b" not in page.inside and "<b>&<" not in page.source
    assert page.figures()


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_without_the_libraries(name, tmp_path, monkeypatch):
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"draws with plotly and jinja2, and (plotly|{name}).* is not installed"):
        ortmodule.report(ORTModule(nn.Linear(1, 1)), tmp_path / "page.html", torch.ones(1, 1))
    assert not (tmp_path / "page.html").exists()


#: What a user does with the keyboard, once all is drawn; the page says what it came to.
KEYS = """<script>
const wait = setInterval(() => {
  const root = document.documentElement.dataset;
  if (!root.drawn) return;
  clearInterval(wait);
  const plot = document.getElementById("plan0"), filter = document.getElementById("filter");
  const width = () => { const [a, b] = plot.layout.xaxis.range; return b - a; };
  const press = (key) => plot.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const whole = width();
  plot.focus();
  root.focused = document.activeElement === plot;
  press("+"); root.zoomed = width() < whole;
  const left = plot.layout.xaxis.range[0];
  press("ArrowRight"); root.moved = plot.layout.xaxis.range[0] > left;
  press("0"); root.back = Math.abs(width() - whole) < 1e-6;
  filter.value = "Embedding"; filter.dispatchEvent(new Event("input"));
  const shown = [...document.querySelectorAll(".tree li:not([hidden])")];
  root.found = shown.length > 0 && shown.every((row) => row.textContent.includes("Embedding"));
  filter.value = ""; filter.dispatchEvent(new Event("input"));
  document.getElementById("collapse").click();
  root.closed = document.querySelectorAll(".tree details[open]").length === 0;
  document.getElementById("expand").click();
  root.opened = document.querySelectorAll(".tree details:not([open])").length === 0;
  root.ended = true;
}, 20);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@each("scheme", ["dark", "light"], ["dark"])
def test_a_browser_draws_it_without_an_error(scheme, written, tmp_path):
    *_, path = written
    path.write_text(path.read_text().replace("</body>", KEYS))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
               f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", path.as_uri()]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert ran.returncode == 0 and not said
    assert 'data-drawn="3"' in ran.stdout, "the last plot was not drawn"
    root = ran.stdout[: ran.stdout.index("<head>")]
    done = re.findall(r'data-(\w+)="true"', root)
    assert {"focused", "zoomed", "moved", "back", "found", "closed", "opened", "ended"} <= set(done), root
    assert ran.stdout.count("main-svg") >= 3 and "<path" in ran.stdout
    colours = {"dark": "rgb(228, 232, 236)", "light": "rgb(28, 32, 36)"}  # of text
    assert colours[scheme] in ran.stdout
