"""A module and its loss are one module, which takes the labels by name."""

import pytest
import torch
from torch import nn

from ortmodule import ModuleWithLoss

X, LABELS = torch.rand(3, 4), torch.tensor([0, 1, 1])


def test_the_loss():
    module = nn.Linear(4, 2)
    whole = ModuleWithLoss(module, nn.CrossEntropyLoss())
    assert torch.equal(whole(X, labels=LABELS), nn.CrossEntropyLoss()(module(X), LABELS))
    assert whole.module is module and {id(p) for p in whole.parameters()} == {id(p) for p in module.parameters()}


class Named(nn.Module):
    def forward(self, x, scale):
        return x * scale


def test_other_names():
    whole = ModuleWithLoss(Named(), lambda found, wanted: (found - wanted).sum(), labels="wanted")
    assert whole(X, scale=2, wanted=X).item() == pytest.approx(X.sum().item())


def test_without_labels():
    with pytest.raises(TypeError, match="ModuleWithLoss wants the labels as labels=..."):
        ModuleWithLoss(nn.Linear(4, 2), nn.CrossEntropyLoss())(X, LABELS)
