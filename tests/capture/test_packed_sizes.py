"""Batches without padding: what is packed in a dimension, lengths or offsets of its parts. One graph for all."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain

WIDTH = 6


def means(m, x, n):
    return torch.stack([part.mean(0) for part in m.layer(x).split(n.tolist())])


def padded(m, x, n):
    parts = m.layer(x).split(n.tolist())
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)


def attention(m, x, n):
    """Of each part, by itself."""
    h = m.layer(x)
    return torch.cat([(p @ p.T).softmax(-1) @ p for p in h.split(n.tolist())])


def slices(m, x, n):
    """Where parts begin is counted by Python."""
    h, at, found = m.layer(x), 0, []
    for length in n.tolist():
        found.append(h[at : at + length].amax(0))
        at = at + length
    return torch.stack(found)


def repeated(m, x, n):
    """A row of each part, for all of its elements."""
    return m.layer(x) * torch.repeat_interleave(m.rows[: n.shape[0]], n, dim=0)


def sums(m, x, n):
    owner = torch.repeat_interleave(torch.arange(n.shape[0]), n)
    return x.new_zeros(n.shape[0], WIDTH).index_add(0, owner, m.layer(x))


def block_mask(m, x, n):
    owner = torch.repeat_interleave(torch.arange(n.shape[0]), n)
    h, same = m.layer(x), owner[:, None] == owner[None]
    return (h @ h.T).masked_fill(~same, float("-inf")).softmax(-1) @ h


def scaled(m, x, n):
    return m.layer(x).sum(0) / n.sum() + n[:, None]


LENGTHS = {f.__name__: f for f in (means, padded, attention, slices, repeated, sums, block_mask, scaled)}


def offset_slices(m, x, begins):
    h, at = m.layer(x), begins.tolist()
    return torch.stack([h[a:b].mean(0) for a, b in zip(at[:-1], at[1:], strict=True)])


def offset_lengths(m, x, begins):
    return torch.stack([p.mean(0) for p in m.layer(x).split(begins.diff().tolist())])


def offset_owner(m, x, begins):
    owner = torch.bucketize(torch.arange(x.shape[0]), begins[1:], right=True)
    return x.new_zeros(begins.shape[0] - 1, WIDTH).index_add(0, owner, m.layer(x))


def offset_positions(m, x, begins):
    owner = torch.bucketize(torch.arange(x.shape[0]), begins[1:], right=True)
    return m.layer(x) * (torch.arange(x.shape[0]) - begins[owner])[:, None]


OFFSETS = {f.__name__: f for f in (offset_slices, offset_lengths, offset_owner, offset_positions)}


class Model(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use, self.layer = use, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.randn(9, WIDTH))

    def forward(self, x, n):
        return self.use(self, x, n)


def batches(parts=3, calls=5, dtype=torch.int64):
    """What is packed, and the lengths."""
    generator = torch.Generator().manual_seed(1)
    for i in range(calls):
        n = torch.randint(1, 9 + i, (parts,), generator=generator)
        yield torch.randn(int(n.sum()), WIDTH, generator=generator), n.to(dtype)


def compare(model, calls, exports=1):
    ours = ORTModule(copy.deepcopy(model))
    for args in calls:
        found = []
        for each in (model, ours):
            each.zero_grad()
            x = args[0].clone().requires_grad_()
            y = each(x, *args[1:])
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *(p.grad for p in each.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    report = explain(ours)
    assert report.captured and report.exports == exports, report
    return ours


@pytest.mark.parametrize("use", LENGTHS)
def test_lengths(use):
    torch.manual_seed(0)
    compare(Model(LENGTHS[use]), batches())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("use", OFFSETS)
def test_offsets(use, dtype):
    torch.manual_seed(0)
    calls = [(x, F.pad(n.cumsum(0), (1, 0)).to(dtype)) for x, n in batches()]
    compare(Model(OFFSETS[use]), calls)


class OneRow(nn.Module):
    """As packed batches of a language model come: one row of tokens, labels, positions."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, weight, ids, labels, n):
        h = torch.cat([F.normalize(p - p.mean(0), dim=-1) for p in self.table(ids)[0].split(n.tolist())])
        logits = self.layer(h * weight)
        return F.cross_entropy(logits, labels[0], reduction="none").sum()[None]


def test_one_row_of_tokens():
    torch.manual_seed(0)
    calls = []
    for x, n in batches():
        size = (1, x.shape[0])
        calls.append((torch.randn(1), torch.randint(20, size), torch.randint(20, size), n))
    compare(OneRow(), calls)


def test_another_number_of_parts_is_another_graph():
    torch.manual_seed(0)
    calls = [*batches(3), *batches(5)]
    compare(Model(means), calls, exports=2)


def test_lengths_that_do_not_add_up_are_pytorchs_error():
    torch.manual_seed(0)
    model = ORTModule(Model(means))
    for x, n in batches():
        model(x, n)
    with pytest.raises(RuntimeError, match="split_with_sizes expects split_sizes to sum exactly to 9"):
        model(torch.randn(9, WIDTH), torch.tensor([2, 3, 3]))
    x = torch.randn(9, WIDTH)
    torch.testing.assert_close(model(x, torch.tensor([2, 3, 4]))[1], model.layer(x)[2:5].mean(0))
    assert explain(model).exports == 1


def classes(m, x, labels):
    """Numbers that add up to a size by accident: as lengths they would be classes that there are not."""
    return F.cross_entropy(m.layer(x).mean(1), labels, reduction="none") + F.one_hot(labels, WIDTH).sum(1)


def test_numbers_that_add_up_by_accident():
    torch.manual_seed(0)
    calls = [(torch.randn(4, 10, WIDTH), torch.tensor([5, 0, 4, 1]))]
    calls += [(torch.randn(b, t, WIDTH), torch.randint(WIDTH, (b,))) for b, t in ((3, 8), (5, 12), (2, 9))]
    compare(Model(classes), calls)


def test_empty_parts():
    torch.manual_seed(0)
    calls = [(torch.randn(sum(n), WIDTH), torch.tensor(n)) for n in ([2, 0, 3], [0, 0, 4], [1, 5, 0])]
    compare(Model(sums), calls)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("repeats", [[2, 0, 3], [4], [0, 0, 0]], ids=str)
def test_repeats(repeats, dtype):
    """The engine computes them: nothing is left to PyTorch inside of the graph."""

    def use(m, x, n):
        rows = m.layer(x)[: n.shape[0]]
        return rows.repeat_interleave(n, 0) if n.shape[0] != 1 else torch.repeat_interleave(n)[:, None] * rows

    torch.manual_seed(0)
    ours = compare(Model(use), [(torch.randn(4, WIDTH), torch.tensor(repeats, dtype=dtype)) for _ in range(2)])
    assert not explain(ours).aten_ops


def test_a_negative_repeat_is_pytorchs_error():
    torch.manual_seed(0)
    model = ORTModule(Model(repeated))
    for x, n in batches():
        model(x, n)
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        model(torch.randn(4, WIDTH), torch.tensor([3, -1, 2]))
