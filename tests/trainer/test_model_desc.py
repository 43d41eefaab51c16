"""A description of a model is read, and tensors are checked against it, with one size for each symbol."""

import pytest
import torch

from ortmodule.trainer.model_desc import Described, ModelDescription

GIVEN = {
    "inputs": [("x", ["batch", 4]), ("mask", ["batch", "length"])],
    "outputs": [("logits", ["batch", "length"]), ("loss", [], True)],
}


def test_read():
    made = ModelDescription(GIVEN)
    assert made.inputs == [Described("x", ("batch", 4)), Described("mask", ("batch", "length"))]
    assert made.outputs[made.loss] == Described("loss", (), True) and made.loss == 1


def tensors(*shapes):
    return [torch.zeros(shape) for shape in shapes]


def test_as_described():
    made = ModelDescription(GIVEN)
    for batch, length in ((2, 3), (5, 1)):
        made.check(tensors((batch, 4), (batch, length)), tensors((batch, length), ()))
    made.check(tensors((2, 4)), tensors((2, 9), (1,)))  # the first ones


@pytest.mark.parametrize(
    "inputs, outputs, message",
    [
        ([(2, 5), (2, 3)], [(2, 3), ()], "input x is described as .*, and has the shape \\[2, 5\\]"),
        ([(2, 4), (3, 3)], [], "batch is 2 in x"),
        ([(2, 4), (2, 3)], [(2, 4)], "length is 3 in mask"),
        ([(2, 4, 1)], [], "has the shape \\[2, 4, 1\\]"),
        ([(2, 4), (2, 3)], [(2, 3), (2,)], "output loss is described as \\[\\]"),
    ],
)
def test_not_as_described(inputs, outputs, message):
    made = ModelDescription(GIVEN)
    for _ in range(2):  # it is not remembered as good
        with pytest.raises(ValueError, match=message):
            made.check(tensors(*inputs), tensors(*outputs))


def test_no_tensor():
    with pytest.raises(TypeError, match="the input x is int, no tensor"):
        ModelDescription(GIVEN).check([3], [])


LOSS = ("loss", [], True)


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "a model description is a dictionary"),
        ({"inputs": [("x", [])], "outputs": [LOSS], "extra": 1}, "has the key 'extra'"),
        ({"inputs": [], "outputs": [LOSS]}, "a list of inputs"),
        ({"inputs": [("x", [])], "outputs": [("y", [])]}, "one output .* is the loss.*none is"),
        ({"inputs": [("x", [])], "outputs": [LOSS, ("l", [], True)]}, "loss, l is"),
        ({"inputs": [("x", []), ("x", [])], "outputs": [LOSS]}, "two tensors of the name x"),
        ({"inputs": [("x", [])], "outputs": [("loss", [3], True)]}, "the loss loss is a scalar"),
        ({"inputs": [("x",)], "outputs": [LOSS]}, "input 0 .* is \\(name, axes\\)"),
        ({"inputs": [("", [])], "outputs": [LOSS]}, "has the name '', no text"),
        ({"inputs": [("x", 3)], "outputs": [LOSS]}, "has the axes 3"),
        ({"inputs": [("x", [-1])], "outputs": [LOSS]}, "has the axis -1"),
        ({"inputs": [("x", [True])], "outputs": [LOSS]}, "has the axis True"),
        ({"inputs": [("x", [])], "outputs": [("loss", [], 1)]}, "is the loss, True, or not, False; not 1"),
    ],
)
def test_descriptions_that_are_none(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ModelDescription(given)
