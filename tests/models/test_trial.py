"""The trial of models forgives the side of a ReLU whose operand is rounding, and nothing else."""

import pytest
import torch
from torch import nn

from tests.models import trial
from tests.models.trial import Different, Subject, check_magnified


class NearZero(nn.Module):
    """Operands of a ReLU, one of which is 0 but for ``rounding``. ``times`` is what the last factor should not be."""

    rounding, times = 0.0, 1.0

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(4)), nn.Parameter(torch.tensor([3.0, 1.0, 2.0, 5.0]))

    def forward(self, x):
        x = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], 1)
        return (nn.functional.relu(self.weight * x + self.weight - 1 + self.rounding) * self.last * self.times).sum()


SUBJECT = Subject(NearZero, lambda module, size, generator: {"x": torch.randn(3 + size, 4, generator=generator)}, "")


def with_engine(monkeypatch, **settings):
    """What stands for the engine's module has these attributes."""

    def engine(module):
        for part in module.modules():
            if isinstance(part, NearZero):
                vars(part).update(settings)
        return module

    monkeypatch.setattr(trial, "quiet", engine)
    monkeypatch.setattr(trial, "beside", lambda module, seed: module)  # none that crosses 0 by chance


@pytest.mark.parametrize("rounding", [0.0, 1e-12, -1e-12])
def test_either_side_is_right(rounding, monkeypatch):
    with_engine(monkeypatch, rounding=rounding)
    check_magnified(SUBJECT, "train")


@pytest.mark.parametrize("rounding", [0.0, 1e-12])
def test_what_is_wrong_on_the_same_side(rounding, monkeypatch):
    with_engine(monkeypatch, rounding=rounding, times=1.001)
    with pytest.raises(Different, match="is off by"):
        check_magnified(SUBJECT, "train")


def test_another_side_is_no_rounding_where_it_is_far(monkeypatch):
    with_engine(monkeypatch, rounding=0.01)
    with pytest.raises(Different):
        check_magnified(SUBJECT, "train")
