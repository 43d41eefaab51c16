"""A first call scales parameters to its data: PyTorch runs it, and the calls behind it have a graph."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

WIDTH = 4


class SetUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("done", torch.tensor(False))
        self.ready = False

    def forward(self, x):
        h = self.first(x)
        self.look(h.detach())
        return self.last((h + self.shift) * self.scale)


class OtherData(SetUp):
    """As the activation norm of a flow does it, told by a buffer."""

    def look(self, h):
        if not self.done:
            self.shift.data = -h.mean(0)
            self.scale.data = 1 / (h.std(0) + 1e-6)
            self.done.fill_(True)


class InPlace(SetUp):
    """Told by an attribute."""

    @torch.no_grad()
    def look(self, h):
        if not self.ready:
            self.shift.sub_(h.mean(0))
            self.scale.copy_(1 / (h.std(0) + 1e-6))
            self.ready = True


class ThroughData(SetUp):
    """Step sizes of quantizers."""

    def look(self, h):
        if self.done == 0:
            self.scale.data.copy_(2 * h.abs().mean() / 3)
            self.done.fill_(1)


class InTraining(SetUp):
    def look(self, h):
        if self.training and not self.done.item():
            nn.init.constant_(self.scale, float(h.abs().max()))
            self.done.data.fill_(True)


class EachCall(SetUp):
    """No set-up."""

    @torch.no_grad()
    def look(self, h):
        self.scale.clamp_(0.5, 2).mul_(0.9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", [OtherData, InPlace, ThroughData, InTraining, EachCall])
def test_as_in_pytorch(cls, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "0")
    torch.manual_seed(0)
    theirs = cls()
    ours = ORTModule(copy.deepcopy(theirs))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for step in range(5):
        x, results = torch.randn(3 + step % 2, WIDTH, generator=torch.Generator().manual_seed(step)), []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            result = model(x)
            result.square().mean().backward()
            results.append([result.detach(), *(p.grad for p in model.parameters())])
            optimizer.step()
        torch.testing.assert_close(*results)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    report = explain(ours)
    if cls is EachCall:
        assert report.fallback == "forward changes the parameter scale"
    else:
        assert report.captured and report.pytorch_calls == 1 and report.exports == 1
