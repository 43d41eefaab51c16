"""States of a whole optimizer are those of its parts, by name (tests/distributed gathers them)."""

import copy

import torch
from torch import nn

from ortmodule.optim import AdamConfig
from ortmodule.trainer.whole_state import WholeNames, put_optimizer, put_weights, skeleton
from tests.trainer import small

CONFIG = AdamConfig([{"params": ["3.bias", "0.weight"], "lr": 0.5}], lr=0.1)


def _optimizer(model, own=None):
    groups = CONFIG.groups(model)
    names = WholeNames(model, groups)
    named = {name: p for name, p in model.named_parameters() if own is None or name in own}
    return CONFIG.optimizer(names.part(groups, named)), names, named


def _stepped(model, optimizer):
    x, label = small.batches(1)[0]
    nn.functional.cross_entropy(model(x), label).backward()
    optimizer.step()


def test_a_part_of_an_optimizer():
    """Loaded into an optimizer of some parameters, a whole state steps these as the whole optimizer does."""
    whole_model, part_model = small.model(), small.model()
    whole, _, _ = _optimizer(whole_model)
    _stepped(whole_model, whole)
    part, names, own = _optimizer(part_model, ("3.bias", "0.bias"))
    assert names.groups == [["0.bias", "3.weight"], ["3.bias", "0.weight"]]
    put_optimizer(part, copy.deepcopy(whole.state_dict()), names, own)
    put_weights(part_model, whole_model.state_dict(), None)
    assert [group["lr"] for group in part.param_groups] == [0.1, 0.5]
    for model, optimizer in ((whole_model, whole), (part_model, part)):
        model.zero_grad()
        _stepped(model, optimizer)
    for name, p in part_model.named_parameters():
        assert torch.equal(p, whole_model.get_parameter(name)) == (name in own), name


def test_weights_of_others_stay():
    model = small.model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    put_weights(model, {name: t + 1 for name, t in before.items()}, ("0.weight",))
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name] + (name == "0.weight")), name


def test_skeleton():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    copy = skeleton(model)
    assert all(p.is_meta for p in copy.parameters()) and not copy[0].bias.requires_grad
    assert model[0].weight.device.type == "cpu" and not copy[1].running_mean.is_meta
    copy.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(copy.eval()(x), model.eval()(x))
