"""Statistics name the tensors of a call, find what is padding, and are printed as a table."""

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortmodule.core import pytree
from ortmodule.debug.step_stats import Padded, input_names, padded_inputs, table, valid_elements


class Net(nn.Module):
    def forward(self, input_ids, batch=None, *states, **others):
        return input_ids


X = torch.ones(2)


@pytest.mark.parametrize(
    "args, kwargs, names",
    [
        ((X,), {}, ["input_ids"]),
        ((X, {"mask": X + 1}), {}, ["input_ids", "batch.mask"]),
        ((X, None, X + 1, [X + 2]), {"extra": X + 3}, ["input_ids", "states.0", "states.1.0", "others.extra"]),
    ],
)
def test_names_of_inputs(args, kwargs, names):
    tensors, structure = pytree.flatten((args, kwargs))
    assert input_names(Net(), structure, len(tensors)) == names


def test_padded_inputs():
    nodes = [
        helper.make_node("Cast", ["input/0"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Embedding", ["state/table", "ids"], ["e"], domain="ortmodule", padding_idx=7),
        helper.make_node("Embedding", ["state/table", "input/1"], ["f"], domain="ortmodule"),
        helper.make_node("Add", ["e", "f"], ["logits"]),
        helper.make_node("Reshape", ["input/2", "shape"], ["labels"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"]),
        helper.make_node("Embedding", ["state/table", "input/3"], ["dead"], domain="ortmodule", padding_idx=0),
    ]
    graph = helper.make_graph(nodes, "g", [], [helper.make_tensor_value_info("loss", TensorProto.FLOAT, None)])
    assert set(padded_inputs(helper.make_model(graph))) == {Padded("EMBED", 0, 7), Padded("LABEL", 2, -100)}


def test_valid_elements():
    assert valid_elements(Padded("EMBED", 0, 7), torch.tensor([7, 1, 0])).tolist() == [False, True, True]


def test_a_table():
    assert table([("A", "BC"), ("100", "2")]).splitlines() == ["| A   | BC |", "|-----|----|", "| 100 | 2  |"]
