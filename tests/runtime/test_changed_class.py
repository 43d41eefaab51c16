"""The wrapped module gets another class, as parametrizations give it one: it stays wrapped, and in the engine."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ortmodule import ORTModule, explain


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


class Shift(nn.Module):
    def forward(self, weight):
        return weight + 1


def pair():
    torch.manual_seed(0)
    theirs = nn.Linear(4, 4)
    return ORTModule(copy.deepcopy(theirs)), theirs


def step(model):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model(x)
    result.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [result.detach(), *gradients]


CHANGES = {
    "nothing": lambda model: None,
    "a weight": lambda model: parametrize.register_parametrization(model, "weight", Double()),
    "another": lambda model: parametrize.register_parametrization(model, "bias", Shift()),
    "a second one": lambda model: parametrize.register_parametrization(model, "weight", Shift()),
    "without the first": lambda model: parametrize.remove_parametrizations(model, "weight"),
    "without any": lambda model: parametrize.remove_parametrizations(model, "bias"),
}


def test_parametrizations_come_and_go():
    ours, theirs = pair()
    for count, change in enumerate(CHANGES.values()):
        change(ours), change(theirs)
        torch.testing.assert_close(step(ours), step(theirs))
        assert explain(ours).engine_calls == count + 1 and explain(ours).pytorch_calls == 0
        assert type(ours).__name__ == type(theirs).__name__ and ours.__class__ is type(ours)
        assert isinstance(ours, ORTModule) and isinstance(ours, nn.Linear)
        assert parametrize.is_parametrized(ours) == parametrize.is_parametrized(theirs)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert type(ours.module) is nn.Linear


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrizations_of_the_library(change):
    ours, theirs = pair()
    for model in (ours, theirs):
        torch.manual_seed(2)
        change(model)
    torch.testing.assert_close(step(ours), step(theirs), rtol=1e-4, atol=1e-5)
    assert explain(ours).engine_calls == 1


def test_a_copy_is_wrapped():
    ours, theirs = pair()
    for model in (ours, theirs):
        CHANGES["a weight"](model)
    other = copy.deepcopy(ours)
    assert isinstance(other, ORTModule) and type(other) is type(ours)
    torch.testing.assert_close(step(other), step(copy.deepcopy(theirs)))
    torch.testing.assert_close(step(ours), step(theirs))
    assert explain(other).engine_calls == 1


def test_another_class_is_refused():
    ours, _ = pair()
    with pytest.raises(TypeError, match="derived from it, which Bilinear is not"):
        ours.__class__ = nn.Bilinear
    assert type(ours.module) is nn.Linear


class Scaled(nn.Linear):
    scale = 2.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_attributes_of_the_class_are_those_of_the_models():
    torch.manual_seed(0)
    ours, x = ORTModule(Scaled(4, 4)), torch.ones(2, 4)
    before = ours(x)
    try:
        type(ours).scale = 3.0
        assert Scaled.scale == 3.0
        torch.testing.assert_close(ours(x), before * 1.5)
        type(ours).offset = 1.0
        del type(ours).offset
        assert not hasattr(Scaled, "offset")
    finally:
        Scaled.scale = 2.0


def test_inside_of_a_cache():
    """What two calls share there (the spectral norm of one step) no graph has."""
    ours, theirs = pair()
    for model in (ours, theirs):
        torch.manual_seed(2)
        parametrizations.spectral_norm(model)
    with pytest.warns(UserWarning, match=r"parametrize\.cached\(\)"):
        for model in (ours, theirs):
            with parametrize.cached():
                loss = model(torch.ones(2, 4)).sum() + model(torch.ones(3, 4)).square().sum()
            loss.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
    ours.zero_grad(), theirs.zero_grad()
    torch.testing.assert_close(step(ours), step(theirs), rtol=1e-4, atol=1e-5)
    assert explain(ours).engine_calls == 1 and explain(ours).pytorch_calls == 2
