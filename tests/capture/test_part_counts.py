"""The number of parts that a call gives, computed from sizes, is PyTorch's."""

import pytest
import torch

from ortmodule.capture.numbers.part_counts import part_count
from ortmodule.core.torch_private import vf_split

CALLS = {
    "split": [(torch.split, (3,), {}), (torch.Tensor.split, (4, -1), {})],
    "split by a name": [(torch.split, (), {"split_size_or_sections": 2}), (torch.Tensor.split, (), {"split_size": 5})],
    "unsafe_split": [(torch.unsafe_split, (3, 1), {}), (torch.split_copy, (100,), {"dim": 1}), (vf_split, (2, 1), {})],
    "chunk": [(torch.chunk, (n,), {"dim": d}) for n in (1, 2, 3, 4, 7) for d in (0, 1)],
    "others with chunks": [(torch.Tensor.chunk, (), {"chunks": 4}), (torch.unsafe_chunk, (5, 1), {})],
    "unbind": [(torch.unbind, (), {}), (torch.Tensor.unbind, (1,), {}), (torch.unbind_copy, (), {"dim": -1})],
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
def test_as_many_as_pytorch_has(kind):
    for function, args, kwargs in CALLS[kind]:
        for sizes in [(n, m) for n in range(1, 14) for m in (1, 2, 5, 8)]:
            x = torch.zeros(sizes)
            count, same = part_count(function, (x, *args), kwargs)
            assert count == len(function(x, *args, **kwargs)), (function, args, kwargs, sizes)
            assert same == (kind != "unbind")


def test_the_tensor_is_named():
    assert part_count(torch.chunk, (), {"input": torch.zeros(4), "chunks": 3})[0] == 2
    assert part_count(torch.unbind, (), {"input": torch.zeros(4, 2), "dim": 1})[0] == 2


@pytest.mark.parametrize("function,dim", [(torch.hsplit, 1), (torch.vsplit, 0), (torch.dsplit, 2)])
def test_what_does_not_fit_into_equal_parts(function, dim):
    x = torch.zeros(4, 5, 6)
    assert part_count(function, (x, 2), {})[0] == x.shape[dim] % 2
    assert part_count(function, (x, [1, 2]), {}) is None


def test_nothing_is_counted():
    x = torch.zeros(4, 2)
    for function, args in (
        (torch.sin, (x,)), (torch.split, (x, [1, 3])), (torch.split, (x, 2, 5)), (torch.chunk, (x, None)),
        (torch.unbind, (x, "n")), (torch.Tensor.split, (x, (4,))),
    ):  # fmt: skip
        assert part_count(function, args, {}) is None
