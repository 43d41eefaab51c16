"""Every row of docs/models.md is right, and the engine runs what the table says that it runs.

A few of them; all with --full. ``python -m tests.models`` runs each in a process of its own; with the same sources
``python -m tests.models --write`` takes what was found here.
"""

import os
import time

import pytest

from tests.models import layers, results, subjects, table
from tests.models.trial import UNBUILT, WRONG, attempt
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


def test_table():
    assert STATES.keys() <= set(subjects.names())
    assert all(state != WRONG for state, _ in STATES.values())
    assert len([name for name in STATES if not name.startswith("nn.")]) > 100


def test_no_class_of_torch_is_left_out():
    assert not layers.missing()
