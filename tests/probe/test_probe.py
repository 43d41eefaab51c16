"""Every entry of docs/ops_torch.md is right, and its cells say what comes out.

A few samples of each; ``python -m tests.probe`` runs all, in processes of their own. With --full every cell of the page
is compared, with all samples where it was made with all.
"""

import pytest
import torch
import torch.nn.functional as F

from ortmodule import ORTModule, explain
from tests.probe import table
from tests.probe.common import MODELS, Behind, compare
from tests.probe.trial import DTYPES, ENTRIES, FALLBACK, FEW, MIXED, NATIVE, WRONG, difference, names_of, probe, run
from tests.selection import each

STATES = table.states()
#: A few that reach every part of the way; all of them with --full.
SHORT = {
    "add", "div.floor_rounding", "max.reduction_with_dim", "cumprod", "logcumsumexp", "median", "index_put",
    "scatter_reduce.amax", "nn.functional.hardtanh", "nn.functional.softplus", "squeeze", "lu_unpack", "linalg.qr",
    "nn.functional.dropout", "einsum", "fft.fftshift",
}  # fmt: skip


@each("name", ENTRIES, SHORT)
def test_entry(name):
    outcome = probe(name, most=FEW)
    assert outcome.state != WRONG, outcome.wrong
    if STATES.get(name) == NATIVE:
        assert outcome.state == NATIVE, dict(outcome.reasons)
    elif STATES.get(name) == "PyTorch":
        assert outcome.state == FALLBACK, "the engine runs it now: python -m tests.probe --write"
    elif STATES.get(name) == MIXED and outcome.samples > table.by_pytorch(name):
        assert outcome.native, f"PyTorch runs more samples than in the table: {dict(outcome.reasons)}"


#: Cells that are compared in the ordinary run: of all three kinds, in all types; of float32 entries with few samples.
SHORT_CELLS = {
    *((name, dtype) for name in ("var", "norm.fro", "sort", "complex", "corrcoef") for dtype in DTYPES[1:]),
    *((name, "float32") for name in ("cholesky", "lerp", "corrcoef", "cfloat", "fft.fft")),
}  # fmt: skip
CELLS = [(name, dtype) for dtype in DTYPES for name in names_of(getattr(torch, dtype))]


@each(("name", "dtype"), CELLS, SHORT_CELLS)
def test_cell(name, dtype):
    """A cell says what comes out today: `python -m tests.probe NAME --write`, with --few for the other types."""
    if table.known_runs()[dtype][1] != table.version():
        pytest.skip("the page was made with another torch")
    outcome = probe(name, getattr(torch, dtype), most=None if dtype == "float32" else FEW)
    row = table.known_rows()[name]
    assert not outcome.wrong
    if name in table.UNSTEADY:
        return
    assert table.cell(outcome) == row[1 + DTYPES.index(dtype)], dict(outcome.reasons)
    if dtype == "float32":
        assert table.share(outcome) == row[-2]
        why = row[-1].startswith(tuple(f"{other}: " for other in DTYPES[1:]))
        assert table.reason(outcome) == (table.NO_REASON if why else row[-1])


def test_table_is_complete():
    assert set(STATES) == set(ENTRIES), "run: python -m tests.probe --write"
    for dtype in DTYPES:
        cells = table.states(dtype)
        assert set(cells.values()) <= {NATIVE, MIXED, "PyTorch", table.NEVER}, dtype
        known = {name for name, cell in cells.items() if cell != table.NEVER}
        assert known == set(names_of(getattr(torch, dtype))), (
            f"run: python -m tests.probe --few --dtype {dtype} --write"
        )


def test_the_page_is_current():
    """Its text is that of its renderer, and its counts are those of its rows: `python -m tests.probe --page`."""
    rows = table.known_rows()
    assert table.PATH.read_text() == table.render(rows, table.known_runs())
    assert set(table.known_runs()) == set(DTYPES)
    for dtype in DTYPES:
        assert sum(table.counts(rows, dtype)) == len(rows) == len(ENTRIES)


#: Of the common models those whose ways are unlike the others'; all of them with --full.
FEW_MODELS = {
    "quantile.linear", "cov", "tensor_split.places", "bce_with_logits.mean", "nn.LSTM.dropout", "nn.MaxUnpool2d",
    "interpolate.nearest-exact", "put.accumulate", "multilabel_margin.mean", "max.all", "F.embedding.max_norm",
    "F.embedding_bag.last.short",
}  # fmt: skip


@each("name", MODELS, FEW_MODELS)
def test_common(name):
    wrong, fallback = compare(name)
    assert not wrong and not fallback


@pytest.mark.parametrize(
    "loss", [F.binary_cross_entropy_with_logits, lambda x, t: F.binary_cross_entropy(x.sigmoid(), t)]
)
def test_losses_of_large_logits(loss):
    """Where the probability is 0 or 1, both the loss and its gradient are finite."""
    logits = torch.tensor([-200.0, -30.0, -1.0, 0.0, 1.0, 18.0, 30.0, 200.0]).requires_grad_()
    target = torch.tensor([1.0, 0.0]).repeat(4)
    module = Behind(lambda x: loss(x, target), (8,))
    module.linear = torch.nn.Identity()
    ours = ORTModule(module)
    assert not difference(run(ours, [logits]), run(module, [logits]))
    assert explain(ours).captured


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(("function", "name"), [(F.huber_loss, "delta"), (F.smooth_l1_loss, "beta")])
def test_numbers_that_need_float64(function, name, reduction):
    """An attribute is float32, which has 8.698115 of it."""
    zeros, wide = torch.zeros(8, dtype=torch.float64), {name: 8.698115367693557}
    module = Behind(lambda x: function(x, zeros, reduction=reduction, **wide), (8,))
    module.linear = torch.nn.Identity()
    logits = torch.tensor([1.0, -9.3, 12.0, 200.0, -3.0, 8.7, -8.69, 0.0]).double().requires_grad_()
    ours = ORTModule(module)
    found, expected = run(ours, [logits]), run(module, [logits])
    for a, b in zip(found[0] + found[2], expected[0] + expected[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert explain(ours).captured


def test_a_gradient_that_pytorch_refuses():
    """Floor division has none: PyTorch runs such a module, and says so."""
    module = Behind(lambda x: x // 0.5, (4, 6))
    ours = ORTModule(module)
    with pytest.raises(RuntimeError, match="floor_divide"):
        ours(torch.ones(4, 6, requires_grad=True)).sum().backward()
