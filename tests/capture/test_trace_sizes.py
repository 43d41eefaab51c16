"""A capture is traced on small parts of the batch, and again at other sizes and values."""

import pytest
import torch

from ortmodule.capture.trace_sizes import BATCH, FEATURE, LENGTH, SHORT, SPACE, Dims, Sizes


def test_kinds():
    dims = Dims([torch.zeros(5, 7, 9), torch.zeros(5, 3, 8, 8), torch.zeros(5, 7, dtype=torch.int64)])
    assert dims.batch == 5
    assert [dims.kind[0, d] for d in range(3)] == [BATCH, LENGTH, FEATURE]
    assert [dims.kind[1, d] for d in range(4)] == [BATCH, FEATURE, SPACE, SPACE]
    assert dims.kind[2, 1] == LENGTH


def test_the_first_trace_is_small():
    sizes = Dims([torch.zeros(64, 100, 16), torch.zeros(64, 100, dtype=torch.int64)]).first_sizes(0)
    assert sizes[0].lengths == {(0, 0): 2, (0, 1): SHORT, (0, 2): 16, (1, 0): 2, (1, 1): SHORT}
    assert sizes[-1].lengths[0, 0] == 64  # all of it, in the end
    assert all(sizes.count(each) == 1 for each in sizes)


def test_a_batch_of_one_is_traced_as_two():
    tensor = torch.arange(3.0).reshape(1, 3)
    sizes = Dims([tensor]).first_sizes(0)[0]
    (part,) = sizes.cut([tensor], frozenset())
    assert part.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_parts_have_what_the_tensors_have():
    tensor = torch.arange(12.0).reshape(6, 2).requires_grad_()
    tensor.scale = 3
    (part,) = Sizes({(0, 0): 2, (0, 1): 2}).cut([tensor], frozenset())
    assert part.tolist() == [[0, 1], [2, 3]] and part.requires_grad and part.is_leaf and part.scale == 3
    assert part.data_ptr() != tensor.data_ptr()


def test_the_second_trace_has_other_sizes_and_values():
    tensor = torch.arange(12.0).reshape(6, 2)
    dims = Dims([tensor])
    first = Sizes({(0, 0): 2, (0, 1): 2})
    other = dims.probe(first, frozenset({(0, 0)}))
    assert other.lengths == {(0, 0): 5, (0, 1): 2} and other.shift
    (part,) = other.cut([tensor], frozenset())
    assert part.shape == (5, 2) and part[0].tolist() != tensor[0].tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_numbers_are_others(dtype):
    number = torch.tensor(0, dtype=dtype)
    same, other = (Sizes({}, shift).cut([number], frozenset({0}))[0] for shift in (False, True))
    assert same == number != other and same is not number


def test_sizes_that_vary_together():
    dims = Dims([torch.zeros(6, 9), torch.zeros(6, 9, 4)])
    groups = dims.groups(Sizes(dict(dims.given)))
    assert groups[0] == frozenset({(0, 0), (1, 0)})
    (mixed,) = [group for group in groups if (0, 1) in group]
    assert mixed == frozenset({(0, 1), (1, 1)})
    assert dims.parts(mixed) == [mixed, frozenset({(1, 1)}), frozenset({(0, 1)})]


def test_lengths_add_up():
    lengths = torch.tensor([3, 0, 5, 4])
    tensors = [torch.zeros(12, 2), lengths]
    dims = Dims(tensors)
    assert dims.packed == {1: [(0, 0)]}
    for sizes in dims.first_sizes(0):
        rows, cut = sizes.cut(tensors, frozenset())
        assert not sizes.packed or cut.sum() == len(rows)


def test_offsets_stay_offsets():
    offsets = torch.tensor([0, 3, 3, 8, 12])
    tensors = [torch.zeros(12, 2), offsets]
    dims = Dims(tensors)
    assert dims.rising == {1} and dims.packed == {1: [(0, 0)]}
    sizes = dims.first_sizes(0)[0]
    rows, cut = sizes.cut(tensors, frozenset())
    assert cut[0] == 0 and cut[-1] == len(rows) and bool((cut.diff() >= 0).all())
