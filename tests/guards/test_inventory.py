"""The tensors of a module are found where they are now, once each, and changes of its parts are seen."""

import pytest
import torch
from torch import nn

from ortmodule.guards.inventory import Inventory, NumberAttributes, Slot


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.first.weight
        self.table, self.count = torch.ones(3), 4


def test_slots():
    net = Net()
    inventory = Inventory(net)
    assert [slot.name for slot in inventory.parameters] == [
        "first.weight", "first.bias", "second.weight", "second.bias", "tied.bias"
    ]  # fmt: skip
    assert [slot.name for slot in inventory.buffers][:2] == ["second.running_mean", "second.running_var"]
    assert [slot.name for slot in inventory.plain] == ["table"]
    assert inventory.slots["first.weight"].get() is net.first.weight and "tied.weight" not in inventory.slots
    assert inventory.names()[id(net.second)] == "second"


def test_tensors_are_those_of_now():
    net = Net()
    inventory = Inventory(net)
    slot = inventory.slots["first.bias"]
    net.first.bias = nn.Parameter(torch.zeros(2))
    assert slot.get() is net.first.bias
    slot.set(torch.ones(2))
    assert net.first._parameters["bias"].tolist() == [1, 1]
    before = inventory.slots["table"]
    net.table, net.other = torch.zeros(2), torch.zeros(1)
    inventory.refresh()
    assert inventory.slots["table"] is before and inventory.slots["other"].get() is net.other
    del net.table
    inventory.refresh()
    assert "table" not in inventory.slots and before.find() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.add_module("third", nn.ReLU()), lambda net: setattr(net, "second", nn.BatchNorm1d(2)),
        lambda net: net.first.register_parameter("more", nn.Parameter(torch.ones(1))),
        lambda net: setattr(net.tied, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda net: setattr(net.first, "bias", None), lambda net: setattr(net.second, "__class__", nn.BatchNorm2d),
    ],
)  # fmt: skip
def test_changes_of_its_parts(change):
    net = Net()
    inventory = Inventory(net)
    net.to(torch.float64)
    assert inventory.is_current()  # other tensors in the same places
    change(net)
    assert not inventory.is_current()


def test_kinds_of_tensors():
    net = Net()
    inventory = Inventory(net)
    kinds = inventory.kinds_of_tensors()
    net.table = torch.zeros(9)
    assert inventory.kinds_of_tensors() == kinds
    net.first.bias.requires_grad_(False)
    assert inventory.kinds_of_tensors() != kinds
    net.first.bias.requires_grad_(True)
    net.first.bias = nn.Parameter(torch.zeros(5))
    assert inventory.kinds_of_tensors() != kinds
    inventory.resize(net.first._parameters, "bias")
    assert inventory.kinds_of_tensors()[1][-1] != torch.Size([5])


def test_numbers_as_tensors():
    attributes = {"count": 4, "share": 0.5, "text": "x"}
    holder = NumberAttributes(attributes, torch.device("cpu"))
    assert holder["count"].dtype is torch.int64 and holder["share"].dtype is torch.float64
    assert "count" in holder and "text" not in holder and "none" not in holder
    holder["count"] = torch.tensor(7)
    assert attributes["count"] == 7
    with holder.held("count", None, 1) as held:
        assert held.item() == 8 and holder["count"] is held and attributes["count"] == 7
    assert holder["count"].item() == 7


def test_counters():
    net = Net()
    inventory = Inventory(net)
    assert inventory.count("", "count") and not inventory.count("", "count") and not inventory.count("first", "weight")
    with inventory.counted(True) as held:
        assert held["count"].item() == 5
    net.count = "none"
    assert inventory.counters == []


def test_what_forward_changes():
    net = Net()
    inventory = Inventory(net)
    assert inventory.treat_as_buffer(net.first.bias) and not inventory.treat_as_buffer(net.first.bias)
    assert [slot.name for slot in inventory.written] == ["first.bias"] and inventory.written[0] in inventory.others


def test_tensors_that_the_engine_cannot_use():
    net = Net()
    assert Inventory(net).unsupported_tensor() is None
    net.table = torch.eye(2).to_sparse()
    assert Inventory(net).unsupported_tensor().startswith("table is a Tensor with layout torch.sparse_coo")


def test_tensors_from_elsewhere_are_slots_if_both_traces_meet_them():
    inventory, kept, made = Inventory(Net()), torch.ones(1), torch.ones(1)
    assert inventory.adopt([kept, made], second=False)
    assert not inventory.adopt([kept], second=True)
    assert [slot.get() for slot in inventory.outside] == [kept]
    assert not inventory.adopt([kept, torch.ones(1)], second=False)  # one is others in every trace


def test_a_slot():
    holder = {"x": torch.ones(1)}
    slot = Slot("x", holder, "x")
    assert slot.leaf is holder["x"] and slot.find() is holder["x"]
    holder.clear()
    assert slot.find("missing") == "missing"
