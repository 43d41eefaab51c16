"""What is said, to whom, and how often."""

import logging
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule
from ortmodule.core import logger
from ortmodule.core.logger import ENGINE, LOGGER


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch):
    for name in ("ORTMODULE_LOG_LEVEL", "RANK"):
        monkeypatch.delenv(name, raising=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(20, 8, padding_idx=0), nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids, labels):
        hidden = self.head(self.norm(nn.functional.gelu(self.embed(ids))))
        return nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())


def batch(padding=0):
    ids = torch.arange(1, 13).reshape(3, 4)
    ids[:, 4 - padding :] = 0
    return ids, torch.where(ids == 0, -100, ids % 5)


def step(level, times=2):
    model = ORTModule(Net(), DebugOptions(log_level=level))
    for _ in range(times):
        model(*batch()).backward()
    return model


def ours(caplog):
    return [record for record in caplog.records if record.name.startswith("ortmodule")]


# --- levels -----------------------------------------------------------------------------------------------------------


def test_nothing_at_the_default_level(caplog, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(LogLevel.WARNING)
    assert not ours(caplog) and capfd.readouterr() == ("", "")


def test_one_summary_at_info(caplog):
    model = step(LogLevel.INFO, 3)
    records = [record for record in ours(caplog) if "the engine runs it" in record.getMessage()]
    assert len(records) == 1 and records[0].levelno == logging.INFO and records[0].name == "ortmodule"
    text = records[0].getMessage()
    for part in ("PyTorch", "peak", "MiB", "capture", "plan", "fused"):
        assert part in text, text
    assert re.search(r"peak +[\d.]+ MiB", text)
    model.eval()
    with torch.no_grad():
        model(*batch())
    assert sum("the engine runs it" in record.getMessage() for record in ours(caplog)) == 1


@pytest.mark.parametrize(
    "level, python, engine, all_ranks, exporter",
    [
        (LogLevel.FATAL, logging.CRITICAL, logging.CRITICAL, False, False),
        (LogLevel.ERROR, logging.ERROR, logging.ERROR, False, False),
        (LogLevel.INFO, logging.INFO, logging.WARNING, False, False),
        (LogLevel.DEVINFO, logging.INFO, logging.INFO, True, True),
        (LogLevel.VERBOSE, logging.DEBUG, logging.DEBUG, True, True),
    ],
)
def test_levels(level, python, engine, all_ranks, exporter):
    log = step(level, 1)._ortmodule.log
    assert (LOGGER.level, ENGINE.level, logger._RANKS.all_ranks) == (python, engine, all_ranks)
    assert log.shows_exporter == exporter


@pytest.mark.parametrize("level, shown", [(LogLevel.WARNING, False), (LogLevel.INFO, True), (LogLevel.VERBOSE, True)])
def test_the_captured_graph(level, shown, caplog):
    step(level)
    graphs = [record for record in ours(caplog) if "captured for" in record.getMessage()]
    assert len(graphs) == shown, "once for the graph of training"


@pytest.mark.parametrize("level, shown", [(LogLevel.INFO, False), (LogLevel.DEVINFO, True)])
def test_what_the_engine_does(level, shown, caplog):
    """A line for each plan, none for a step."""
    step(level, 1)
    plans = sum(record.name == "ortmodule.engine" for record in ours(caplog))
    step(level, 3)
    again = sum(record.name == "ortmodule.engine" for record in ours(caplog))
    assert bool(plans) == shown and again == 2 * plans


@pytest.mark.parametrize("level, shown", [(LogLevel.INFO, False), (LogLevel.DEVINFO, True)])
def test_the_exporters_remarks(level, shown, caplog):
    class Chatty(Net):
        def forward(self, ids, labels):
            if torch.jit.is_tracing():
                warnings.warn("a remark during capture", UserWarning, stacklevel=1)
            return super().forward(ids, labels)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ORTModule(Chatty(), DebugOptions(log_level=level))
        model(*batch())
    during = [w for w in caught if "a remark during capture" in str(w.message)]
    assert bool(during) == shown


def test_the_environment_beats_the_argument(monkeypatch):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "verbose")
    assert step(LogLevel.ERROR)._ortmodule.config.log_level is LogLevel.VERBOSE


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level, count", [(LogLevel.INFO, 0), (LogLevel.DEVINFO, 1)])
def test_other_ranks(level, count, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    step(level)
    assert sum("the engine runs it" in record.getMessage() for record in ours(caplog)) == count


@pytest.mark.parametrize("rank, count", [("0", 1), ("1", 0)])
def test_warnings_are_of_rank_0_and_come_once(rank, count, caplog, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    model = ORTModule(nn.Linear(2, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(0, 2))
    assert sum("an input is empty" in str(warning.message) for warning in caught) == count
    assert sum("an input is empty" in record.getMessage() for record in ours(caplog)) == count


def test_errors_only(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(nn.Linear(2, 2), DebugOptions(log_level=LogLevel.ERROR))(torch.ones(0, 2))
    assert not ours(caplog)


# --- the progress bar -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_on_a_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    step(LogLevel.WARNING)
    text = capsys.readouterr().err
    assert ("Net:" in text) == terminal
    if terminal:
        assert all(phase in text for phase in ("capture", "read", "check"))
        assert text.endswith("\r"), "the bar goes away"


#: What a notebook's kernel has: modules that tqdm looks for, and widgets that keep what they are told.
NOTEBOOK = """
import sys, types

class Widget:
    made = []
    def __init__(self, **given):
        self.layout, self.style, self.closed, self.styles = types.SimpleNamespace(), types.SimpleNamespace(), False, []
        vars(self).update(given)
        self.made.append(self)
    def __setattr__(self, name, value):
        vars(self)[name] = value
        if name in ("bar_style", "value") and hasattr(self, "styles"):
            self.styles.append((name, value))
    def close(self):
        self.closed = True

def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)

shown = []
module("IPython", get_ipython=lambda: Widget())
module("IPython.display", display=shown.append)
module("ipykernel")
module("ipykernel.zmqshell")
kinds = {name: type(name, (Widget,), {"bar_style": ""}) for name in ("HTML", "FloatProgress", "HBox")}
module("ipywidgets", **kinds)

import torch
from ortmodule import ORTModule
from ortmodule.core import logger

assert logger.IN_NOTEBOOK and not sys.stderr.isatty()
ORTModule(torch.nn.Linear(2, 2))(torch.ones(3, 2)).sum().backward()
(box,) = shown
left, bar, right = box.children
told = [value for name, value in right.styles if name == "value"]
print("name:", {value for name, value in left.styles if name == "value"})
print("phases:", [phase for phase in ("capture", "read", "check") if any(phase in text for text in told)])
print("styles:", [value for name, value in bar.styles if name == "bar_style"])
print("full:", bar.value == bar.max, "closed:", box.closed)
"""


def test_a_progress_bar_in_a_notebook():
    """It has the phases, is full at the end, and goes away."""
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Linear:" in done.stdout and "phases: ['capture', 'read', 'check']" in done.stdout, done.stdout
    assert "styles: []" in done.stdout and "full: True closed: True" in done.stdout, done.stdout
    assert "Linear" not in done.stderr, done.stderr


# --- figures ----------------------------------------------------------------------------------------------------------


def test_input_density(monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_PRINT_INPUT_DENSITY", "1")
    model = ORTModule(Net())
    for i in range(20):
        ids, labels = batch(padding=i % 2)
        model(ids, labels=labels).backward()
    tables = [r.getMessage() for r in ours(caplog) if "input density" in r.getMessage()]
    assert len(tables) == 2, "every 10 steps"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[0].splitlines()[1:]]
    names = ["STEP", "INPUT TYPE", "INPUT NAME", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS"]
    assert lines[0] == [*names, "VALID TOKENS/BATCH"]
    rows = lines[2:]
    assert len(rows) == 20
    assert ["0", "EMBED", "ids", "0", "100.00 %", "12", "12", "[4, 4, 4]"] in rows
    assert ["1", "EMBED", "ids", "0", "75.00 %", "9", "12", "[3, 3, 3]"] in rows
    assert ["1", "LABEL", "labels", "-100", "75.00 %", "9", "12", "[3, 3, 3]"] in rows
    assert lines[0] and "10" in [line.strip("|").split("|")[0].strip() for line in tables[1].splitlines()]


def test_memory_stats(monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    step(LogLevel.WARNING, 2)
    lines = [r.getMessage() for r in ours(caplog) if "memory (MiB)" in r.getMessage()]
    when = [re.search(r"step (\d) memory \(MiB\) \| ([a-z ]+) \|", line).groups() for line in lines]
    assert when == [
        (step, f"{side} {part}") for step in "01" for part in ("forward", "backward") for side in ("before", "after")
    ]
    names = ["allocated", "max allocated", "cached", "max cached", "inactive", "max inactive"]
    assert all(re.findall(r"([a-z ]+): [\d.]+", line.partition("| ")[2])[-6:] for line in lines)
    for name in names:
        assert all(f"{name}: " in line for line in lines)


@pytest.mark.parametrize("name", ["PRINT_INPUT_DENSITY", "PRINT_MEMORY_STATS", "VERIFY"])
def test_nothing_looks_on_by_default(name, monkeypatch):
    monkeypatch.setenv(f"ORTMODULE_{name}", "0")
    assert ORTModule(Net())._ortmodule.observers is None


@pytest.mark.parametrize("kept", [True, False])
def test_a_warning_goes_one_way_unless_a_log_is_kept(kept, monkeypatch):
    """Python's own log of last resort would print what the warning prints."""
    said = []
    monkeypatch.setattr(logger, "_is_kept", lambda: kept)
    monkeypatch.setattr(LOGGER, "log", lambda *args: said.append(args))
    with pytest.warns(UserWarning, match="an input is empty") as warned:
        ORTModule(nn.Linear(2, 2))(torch.ones(0, 2))
    assert len(warned) == 1 and len(said) == kept


def test_a_log_that_is_kept_is_seen(monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(LOGGER, "handlers", [logger._OWN])
    assert not logger._is_kept()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    assert logger._is_kept()


def test_a_report_names_the_module_once(caplog):
    step(LogLevel.INFO, 1)
    (text,) = [r.getMessage() for r in ours(caplog) if "the engine runs it" in r.getMessage()]
    assert text.startswith("Net: the engine runs it")


@pytest.mark.parametrize("rank, times", [("0", 1), ("1", 0)])
def test_a_warning_of_the_process_comes_once_and_on_one_rank(rank, times, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            logger.warn_once(f"this is said by rank {rank}")
    assert len(found) == times


def test_an_error_is_shown_where_warnings_are_not(caplog):
    log = logger.Log("Net", LogLevel.WARNING)
    log.level = LogLevel.ERROR
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        log.warn_once("a warning")
        for _ in range(2):
            log.warn_once("an error", logging.ERROR)
    assert [str(w.message) for w in found] == ["ORTModule(Net): an error"]
    assert [r.levelname for r in ours(caplog) if "an error" in r.getMessage()] == ["ERROR"]  # once, as the warning
