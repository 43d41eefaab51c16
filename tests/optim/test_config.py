"""Descriptions of optimizers make groups of parameters by name, and refuse names and settings that are none."""

import pytest
from torch import nn

from ortmodule.optim import AdamConfig, LambConfig, SGDConfig

NET = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


@pytest.mark.parametrize("config", [AdamConfig, LambConfig, SGDConfig])
def test_groups(config):
    groups = config(params=[{"params": ["0.bias", "1.bias"], "lr": 0.5}], lr=0.1).groups(NET)
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(NET[0].weight), id(NET[1].weight)], [id(NET[0].bias), id(NET[1].bias)]
    ]  # fmt: skip
    assert [group["lr"] for group in groups] == [0.1, 0.5]


def test_all_in_groups():
    names = [name for name, _ in NET.named_parameters()]
    (group,) = AdamConfig(params=[{"params": names, "lambda_coef": 0.25}]).groups(NET)
    assert group["weight_decay"] == 0.25 and len(group["params"]) == 4


def test_attributes():
    config = AdamConfig(lr=1, alpha=0.5)
    assert config.lr == 1.0 and config.alpha == 0.5 and config.max_norm_clip == 1.0


@pytest.mark.parametrize(
    "groups, message",
    [
        ([{"params": ["0.weigt"]}], "no parameter 0.weigt; did you mean 0.weight"),
        ([{"params": ["0.weight"]}, {"params": ["0.weight"]}], "0.weight is in two groups"),
    ],
)
def test_names_of_no_parameter(groups, message):
    with pytest.raises(ValueError, match=message):
        AdamConfig(params=groups).groups(NET)


def test_frozen_parameters():
    net = nn.Linear(2, 2)
    net.weight.requires_grad_(False)
    (group,) = SGDConfig().groups(net)
    assert [id(p) for p in group["params"]] == [id(net.bias)]
    with pytest.raises(ValueError, match="weight is in a group of the optimizer, and frozen"):
        SGDConfig(params=[{"params": ["weight"]}]).groups(net)
    net.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameters to train"):
        SGDConfig().groups(net)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"params": [{"params": "weight"}]}, TypeError, "a list of names as 'params', not 'weight'"),
        ({"params": [{"params": ["w"], "alhpa": 1}]}, ValueError, "has no setting alhpa; did you mean alpha"),
        ({"max_norm_clip": 0}, ValueError, "max_norm_clip must be above 0"),
    ],
)
def test_refused(given, error, message):
    with pytest.raises(error, match=message):
        AdamConfig(**given)
