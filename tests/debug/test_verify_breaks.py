"""ORTMODULE_VERIFY compares graphs that submodules break: the whole with the module, each piece with its operators."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortmodule import ORTModule, explain
from ortmodule.debug import verify
from ortmodule.debug.verify import Verifier

pytestmark = pytest.mark.filterwarnings("ignore")
KEPT: list = []


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")
    KEPT.clear()


class Keeps(nn.Module):
    """Draws, changes a buffer, and lets a tensor escape."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        y = self.dropout(self.linear(x))
        KEPT.append(y.square().mean())
        return y


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 32), nn.BatchNorm1d(32)
        self.second, self.part, self.last = nn.Linear(32, 8), Keeps(), nn.Linear(8, 32)

    def forward(self, x):
        y = F.dropout(self.norm(self.first(x)).relu(), 0.2)
        y = self.part(self.second(y)) + torch.randint(0, 5, (8,))
        y = self.part(y.tanh()) * torch.rand_like(y)
        return F.dropout(self.last(y), 0.1).square().mean()


def trained(steps=3):
    torch.manual_seed(0)
    module = ORTModule(Broken())
    losses = []
    for n in (5, 7, 5)[:steps]:
        loss = module(torch.randn(n, 8))
        (loss + sum(KEPT[-2:])).backward()
        losses += [loss.detach(), *[t.detach() for t in KEPT[-2:]]]
    return module, [*losses, *module.buffers(), *[p.grad for p in module.parameters()]]


def test_nothing_is_found_and_no_trace_left(monkeypatch):
    module, found = trained()
    report, verifier = explain(module), module._ortmodule.observers.one(Verifier)
    assert set(report.breaks) == {"part"}, report.fallback
    assert not verifier.findings, [str(finding) for finding in verifier.findings]
    assert verifier.compared == 3 and verifier.gradients == 3 * 3  # pieces
    assert len(KEPT) == 6
    monkeypatch.setenv("ORTMODULE_VERIFY", "0")
    KEPT.clear()
    assert all(map(torch.equal, found, trained()[1]))


@pytest.mark.parametrize("wrong", ["a result", "a gradient"])
def test_what_differs_is_found(wrong, monkeypatch):
    eager = verify._PieceRun.eager

    def spoiled(run, *change):
        made = eager(run, *change)
        if wrong == "a result":
            made.results[0] = made.results[0] * 1.5
        else:
            made.results[:] = [t * 1.5 - (t * 0.5).detach() if t.requires_grad else t for t in made.results]
        return made

    monkeypatch.setattr(verify._PieceRun, "eager", spoiled)
    module, _ = trained(1)
    findings = module._ortmodule.observers.one(Verifier).findings
    assert findings and ("gradient" in findings[0].what) == (wrong == "a gradient")


def test_what_a_whole_differs_in(monkeypatch):
    """Between the pieces: what a submodule is given, and in which order."""
    run_eager = verify.run_eager

    def spoiled(*args, **options):
        found = run_eager(*args, **options)
        found.results[0] = found.results[0] * 1.5
        return found

    monkeypatch.setattr(verify, "run_eager", spoiled)
    module, _ = trained(1)
    (finding,) = module._ortmodule.observers.one(Verifier).findings
    assert "tensor 0 of the result" in finding.what


class Cut(Broken):
    """Values that forward keeps end pieces, too, where PyTorch runs nothing."""

    def forward(self, x):
        y = self.kept = F.dropout(self.norm(self.first(x)).relu(), 0.2)
        y = F.dropout(self.second(y), 0.4)
        y = self.part(y) + torch.randint(0, 5, (8,))
        y = self.also = F.dropout(y, 0.3)
        y = F.dropout(y * 2, 0.5) + self.part(y.tanh()) * torch.rand_like(y)
        return F.dropout(self.last(y), 0.1).square().mean()


def test_pieces_without_a_submodule_between():
    module = ORTModule(Cut())
    for n in (5, 7, 5):
        (module(torch.randn(n, 8)) + module.kept.mean() + module.also.square().mean()).backward()
    assert explain(module).captured and None in module._ortmodule.latest.runs
    verifier = module._ortmodule.observers.one(Verifier)
    assert not verifier.findings, [str(finding) for finding in verifier.findings]
    assert verifier.compared == 3
