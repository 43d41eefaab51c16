"""Forward runs on copies of what a module holds, all is put back, and what it has changed is told."""

import random

import torch
from torch import nn

from ortmodule.guards.inventory import Inventory
from ortmodule.guards.isolation import contents, isolated, places_of, replace_parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.table, self.steps, self.names = torch.ones(2), 0, ["a"]


def test_all_is_put_back():
    net = Net()
    mean, table, hook = net.mean, net.table, net.layer.register_forward_hook(lambda *_: None)
    state = random.getstate()
    with isolated(Inventory(net)) as copies:
        assert copies["mean"] is net.mean is not mean and copies["table"] is net.table is not table
        net.mean.add_(1)
        net.table, net.steps, net.new = torch.zeros(5), 7, "new"
        net.names.append("b")
        hook.remove()
        random.random()
    assert net.mean is mean and mean.tolist() == [0, 0] and net.table is table
    assert net.steps == 0 and net.names == ["a"] and not hasattr(net, "new")
    assert len(net.layer._forward_hooks) == 1 and random.getstate() == state


def test_also_behind_an_error():
    net = Net()
    try:
        with isolated(Inventory(net)):
            net.steps = 7
            raise ValueError
    except ValueError:
        pass
    assert net.steps == 0


def test_other_parameters():
    net = Net()
    inventory, weight = Inventory(net), net.layer.weight
    weight.scale = 2
    with isolated(inventory):
        made = replace_parameters(inventory, lambda t: t.double())
        assert net.layer.weight.dtype is torch.float64 and net.layer.weight.scale == 2
        assert made[id(weight)] is net.layer.weight and net.layer.weight.requires_grad
    assert net.layer.weight is weight


def test_places_of_a_tensor():
    net = Net()
    net.again, net.kept = net.table, [net.table]
    places = places_of(net.table, Inventory(net))
    assert [(type(holder), key) for holder, key in places] == [(dict, "table"), (dict, "again"), (list, 0)]


def changed(do):
    net = Net()
    inventory = Inventory(net)
    before = contents(inventory)[""]
    do(net)
    return {key for _, key in before.changed(contents(inventory)[""])}


def test_what_has_changed():
    assert changed(lambda net: None) == set()
    assert changed(lambda net: setattr(net, "steps", 1)) == {"steps"}
    assert changed(lambda net: net.names.append("b")) == {"names"}
    assert changed(lambda net: setattr(net, "names", ["a"])) == set()  # an equal one
    assert changed(lambda net: setattr(net, "mean", torch.zeros(2))) == {"mean"}
    assert changed(lambda net: delattr(net, "table")) == {"table"}
