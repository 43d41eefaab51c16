"""Every row of docs/models.md is right, and its cells say what comes out.

A few of them; all with --full. ``python -m tests.models`` runs each in a process of its own; with the same sources
``python -m tests.models --write`` takes what was found here.
"""

import os
import re
import time

import pytest

from tests.models import layers, results, subjects, table, tiny
from tests.models.trial import UNBUILT, WRONG, Outcome, attempt, check_draws
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers

STATES = table.states()
#: A few that reach every part of the way.
SHORT = {
    "mixtral", "whisper", "nn.GLU", "nn.GroupNorm", "nn.CTCLoss", "nn.MaxPool2d", "nn.ModuleDict", "nn.LSTMCell",
    "unet", "graph-net", "dlrm", "vae",
}  # fmt: skip


@each("name", STATES, SHORT)
def test_model(name):
    try:
        subject = subjects.subject(name)
    except ImportError as error:
        pytest.skip(f"it needs another library: {error}")
    start = time.perf_counter()
    outcome = attempt(name, subject)
    outcome.seconds = round(time.perf_counter() - start, 1)
    assert outcome.state not in (WRONG, UNBUILT), outcome.reason
    if STATES[name][1] == table.ENGINE:
        assert outcome.captured, outcome.reason
    if "ORTMODULE_BUILD" not in os.environ:
        results.keep(outcome)
        if table.known_versions() == table.versions():
            found, known = (table.comparable(row) for row in (table.row_of(outcome), table.known_rows()[name]))
            assert found == known, f"run: python -m tests.models {name} --write"


@each("name", STATES, ("mixtral", "nn.GLU", "vae"))
@pytest.mark.parametrize("drops", [False, True], ids=["without dropout", "as it comes"])
def test_verify_finds_nothing(name, drops, monkeypatch):
    """Neither in forward nor in gradients, in training mode, with what the model drops at random or without it."""
    if drops:
        monkeypatch.setattr(tiny, "without_randomness", lambda model: model)
    try:
        subject = subjects.subject(name)
    except ImportError as error:
        pytest.skip(f"it needs another library: {error}")
    check_draws(subject, Outcome(name))


def test_table():
    """`python -m tests.models --page` writes the text around the rows; `NAME --write` a row."""
    rows = table.known_rows()
    assert table.PATH.read_text() == table.render(rows, table.known_versions())
    assert all(state != WRONG for state, _ in STATES.values())
    assert len([name for name in STATES if not name.startswith("nn.")]) > 100
    if table.known_versions() == table.versions():
        assert set(rows) == set(subjects.names())
        assert list(STATES) == [name for name in subjects.names() if name in STATES]


def test_every_name_is_counted_once():
    """The first table's columns add up, and its last line is that of all rows."""
    rows = table.known_rows()
    lines = [line for line in table.PATH.read_text().splitlines() if re.fullmatch(r"\| [\w.]+ (\| \d+ )+\|", line)]
    *groups, together = [list(map(int, re.findall(r"\| (\d+)", line))) for line in lines]
    assert len(groups) == len(table.GROUPS) and together == [sum(column) for column in zip(*groups, strict=True)]
    for every, compared, right, double, wrong, unsettled, alone, parts, by_pytorch in [*groups, together]:
        assert every == compared + unsettled
        assert compared == right + double + wrong == alone + parts + by_pytorch
    assert together[0] == len(rows) and together[1] == len(STATES)


def test_what_a_missing_library_leaves(tmp_path, monkeypatch):
    """A row that was compared elsewhere; what is not settled any more is counted there."""
    page = tmp_path / "models.md"
    page.write_text(table.PATH.read_text())
    monkeypatch.setattr(table, "PATH", page)
    before, names = table.known_rows(), list(table.known_rows())
    table.write({"gpt2": Outcome("gpt2", state=UNBUILT, reason="ImportError: timm")}, names)
    assert table.known_rows() == before
    table.write({"gpt2": Outcome("gpt2", state=UNBUILT, reason="ValueError: no batch")}, names)
    after = table.known_rows()
    assert after["gpt2"][1] == UNBUILT and after["gpt2"][8] == "ValueError: no batch"
    unsettled = [table.counts(list(rows.values()))[5] for rows in (before, after)]
    assert unsettled[1] == unsettled[0] + 1


def test_no_class_of_torch_is_left_out():
    assert not layers.missing()
