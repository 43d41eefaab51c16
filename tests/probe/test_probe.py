"""Every entry of docs/ops_torch.md is right, and the engine runs what the table says that it runs.

A few samples of each; ``python -m tests.probe`` runs all, in processes of their own.
"""

import pytest
import torch
import torch.nn.functional as F

from ortmodule import ORTModule, explain
from tests.probe import table
from tests.probe.common import MODELS, PYTORCH, Behind, compare
from tests.probe.trial import DTYPES, ENTRIES, FEW, MIXED, NATIVE, WRONG, difference, names_of, probe, run
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
    elif STATES.get(name) == MIXED and outcome.samples > table.by_pytorch(name):
        assert outcome.native, f"PyTorch runs more samples than in the table: {dict(outcome.reasons)}"


def test_table_is_complete():
    assert set(STATES) == set(ENTRIES), "run: python -m tests.probe --write"
    for dtype in DTYPES:
        cells = table.states(dtype)
        assert set(cells.values()) <= {NATIVE, MIXED, "PyTorch", table.NEVER}, dtype
        known = {name for name, cell in cells.items() if cell != table.NEVER}
        assert known == set(names_of(getattr(torch, dtype))), (
            f"run: python -m tests.probe --few --dtype {dtype} --write"
        )


#: Of the common models those whose ways are unlike the others'; all of them with --full.
FEW_MODELS = {
    "quantile.linear", "cov", "tensor_split.places", "bce_with_logits.mean", "nn.LSTM.dropout", "nn.MaxUnpool2d",
    "interpolate.nearest-exact", "put.accumulate", "multilabel_margin.mean", "max.all",
}  # fmt: skip


@each("name", MODELS, FEW_MODELS)
def test_common(name):
    wrong, fallback = compare(name)
    assert not wrong
    assert bool(fallback) == (name in PYTORCH) and PYTORCH.get(name, "") in fallback, fallback


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["var", "nn.functional.binary_cross_entropy_with_logits", "norm.fro", "dist", "sort"])
def test_types(name, dtype):
    outcome = probe(name, getattr(torch, dtype), most=FEW)
    assert outcome.state == NATIVE, outcome.wrong or dict(outcome.reasons)


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


def test_a_gradient_that_pytorch_refuses():
    """Floor division has none: PyTorch runs such a module, and says so."""
    module = Behind(lambda x: x // 0.5, (4, 6))
    ours = ORTModule(module)
    with pytest.raises(RuntimeError, match="floor_divide"):
        ours(torch.ones(4, 6, requires_grad=True)).sum().backward()
