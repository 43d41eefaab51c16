"""NumPy's numbers and arrays among arguments are flattened, and come back as they were."""

import numpy
import pytest
import torch

from ortmodule.core import pytree
from ortmodule.core.errors import Unflattenable


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint64"])
def test_a_number_is_the_python_number_it_equals(kind):
    value = numpy.dtype(kind).type(3.5)
    _, structure = pytree.flatten((value, 2))
    assert [*structure.numbers().values()] == [value.item(), 2]
    back, _ = structure.rebuild([])
    assert type(back) is type(value) and back == value
    assert structure.without_numbers() == pytree.flatten((type(value)(5), 7))[1].without_numbers()


def test_numbers_that_are_operands():
    _, structure = pytree.flatten((numpy.float32(0.3), numpy.int8(3), "text"))
    structure, numbers = structure.lifted({*structure.numbers()}, [])
    assert numbers == [numpy.float32(0.3).item(), 3]
    a, b, _ = structure.rebuild([torch.tensor(0.5), torch.tensor(7)])
    assert (type(a), a, type(b), b) == (numpy.float32, 0.5, numpy.int8, 7)


def test_nan_and_zeros():
    def structure(value):
        return pytree.flatten(numpy.float32(value))[1]

    assert structure("nan") == structure("nan")
    assert structure(0.0) != structure(-0.0)


def test_arrays_are_copies():
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    tensors, structure = pytree.flatten((array, {"same": array}, array.T))
    assert len(tensors) == 2
    array[:] = 0
    first, second, turned = structure.rebuild(tensors)
    assert first is second["same"] and first.dtype == numpy.float32
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]] and turned.strides == array.T.strides


def test_an_array_that_cannot_be_written(recwarn):
    array = numpy.ones(3)
    array.flags.writeable = False
    assert pytree.flatten(array)[0][0].tolist() == [1, 1, 1]
    assert not recwarn.list


OTHERS = {
    "objects": numpy.array([1, None]),
    "text": numpy.array(["a"]),
    "other bytes": numpy.ones(2, ">f4"),
    "backwards": numpy.ones(2)[::-1],
    "with a mask": numpy.ma.masked_array([1.0, 2.0], [True, False]),
}


@pytest.mark.parametrize("array", OTHERS.values(), ids=OTHERS)
def test_what_no_tensor_can_be(array):
    with pytest.raises(Unflattenable):
        pytree.flatten(array)


def test_a_result_is_the_array_itself():
    array = numpy.ones(2)
    tensors, structure = pytree.flatten(array, results=True)
    assert not tensors and structure.rebuild([]) is array
