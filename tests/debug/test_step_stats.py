"""Statistics name the tensors of a call, find what is padding, and are printed as a table."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy
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


@dataclass
class Batch:
    x: torch.Tensor
    weight: torch.Tensor


Pair = namedtuple("Pair", "x y")
SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize(
    "argument, names",
    [
        (SPARSE, ["input_ids.indices", "input_ids.values"]),
        ([X, SPARSE, X + 1], ["input_ids.0", "input_ids.1.indices", "input_ids.1.values", "input_ids.2"]),
        (nn.Parameter(X), ["input_ids"]),
        ((X, nn.Parameter(X)), ["input_ids.0", "input_ids.1"]),
        (numpy.ones(3), ["input_ids"]),
        (Batch(X, SPARSE), ["input_ids.x", "input_ids.weight.indices", "input_ids.weight.values"]),
        (Pair(X, X + 1), ["input_ids.0", "input_ids.1"]),
        (UserDict(a=X, b=[X + 1]), ["input_ids.data.a", "input_ids.data.b.0"]),
        ({"n": numpy.float32(2), "x": X}, ["input_ids.x"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_in_arguments_of_each_kind(argument, names):
    """No tensors are needed for that: nothing is made of what stands for them."""
    tensors, structure = pytree.flatten(((argument,), {}))
    assert input_names(Net(), structure, len(tensors)) == names


@pytest.mark.parametrize("number", [2.5, 3, numpy.float32(2), numpy.int64(4)], ids=lambda number: type(number).__name__)
def test_names_of_numbers_that_vary(number):
    _, structure = pytree.flatten(((X, number), {}))
    lifted, _ = structure.lifted(frozenset(structure.numbers()), [X])
    assert input_names(Net(), lifted, 2) == ["input_ids", "batch"]


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
