"""ORTMODULE_VERIFY knows what a module held before a call, and the roundings in its buffers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule import ORTModule, explain
from ortmodule.debug.verify import Verifier
from tests.debug.test_standard_form import Doubled
from tests.debug.test_verify import check, verifier

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def each_call(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")


class Branch(nn.Module):
    """PyTorch runs it between two pieces of the graph: what it keeps belongs to autograd's graph."""

    def forward(self, x):
        KEPT[:] = [x * 2]
        return KEPT[0] + 0


KEPT = []


class Cancels(nn.Module):
    """The second running mean is nothing but rounding: its data have no mean."""

    def __init__(self, between):
        super().__init__()
        self.first, self.mix, self.second = nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.mix(self.first(x))))


@pytest.mark.parametrize(
    ("between", "outside"),
    [(nn.Identity(), ([], 0)), (Doubled.apply, ([], 1)), (Branch(), (["between"], 1))],
    ids=["nothing", "a node", "a break"],
)
def test_what_cancels(between, outside):
    """``between``: what is before the second norm; ``outside``: breaks, and how many parts PyTorch runs."""
    torch.manual_seed(0)
    model = ORTModule(Cancels(between))
    for rows in (64, 48, 96):
        model(torch.randn(rows, 8)).square().sum().backward()
    assert 0 < model.second.running_mean.abs().max() < 1e-6
    report, found = explain(model), verifier(model)
    assert report.captured and (report.breaks, len(report.python_ops)) == outside
    assert found.compared == 3 and not found.findings, [str(finding) for finding in found.findings]
    before = Verifier._outputs
    for off in 1e-7, 1e-5:  # both are large beside the means; roundings of the data are larger than the first

        def spoiled(self, call, *args, off=off):
            with torch.no_grad():
                model.second.running_mean[3] += off
            return before(self, call, *args)

        assert not found.findings
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Verifier, "_outputs", spoiled)
            model(torch.randn(64, 8)).square().sum().backward()
    (finding,) = found.findings
    assert "the buffer second.running_mean" in finding.what


class SetsItsOwn(nn.Module):
    """Goes on with a tensor that the call before has left in an attribute, where there was none at first."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(8, 8), None

    def forward(self, x):
        y = F.dropout(self.layer(x), 0.2)
        if self.kept is not None:
            y = y + 0.1 * self.kept
        self.kept = y.detach().mean(0)
        self.also = y.detach().sum()
        return y.square().mean()


def test_attributes_that_forward_sets(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    model = ORTModule(SetsItsOwn())
    for _ in range(4):
        model(torch.randn(5, 8)).backward()
    check(model, 4)
    model.kept = None
    model(torch.randn(7, 8)).backward()
    check(model, 5)
