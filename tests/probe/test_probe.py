"""Every entry of docs/ops_torch.md is right, and the engine runs what the table says that it runs.

A few samples of each; ``python -m tests.probe`` runs all, in processes of their own.
"""

import pytest

from tests.probe import table
from tests.probe.trial import ENTRIES, FEW, NATIVE, WRONG, probe

STATES = table.states()
#: A few that reach every part of the way; all of them with --full.
SHORT = {
    "add", "div.floor_rounding", "max.reduction_with_dim", "cumprod", "logcumsumexp", "median", "index_put",
    "scatter_reduce.amax", "nn.functional.hardtanh", "nn.functional.softplus", "squeeze", "lu_unpack", "linalg.qr",
    "nn.functional.dropout", "einsum", "fft.fftshift",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.full) for n in ENTRIES])
def test_entry(name):
    outcome = probe(name, most=FEW)
    assert outcome.state != WRONG, outcome.wrong
    if STATES.get(name) == NATIVE:
        assert outcome.state == NATIVE, dict(outcome.reasons)


def test_table_is_complete():
    assert set(STATES) == set(ENTRIES), "run: python -m tests.probe --write"
    assert WRONG not in STATES.values()
