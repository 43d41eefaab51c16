"""Packed sequences: any lengths are one graph, and results, gradients and errors are PyTorch's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")


class Recurrent(nn.Module):
    def __init__(self, forward, kind=nn.LSTM, **options):
        super().__init__()
        width = 6 * (1 + options.get("bidirectional", False))
        self.first = kind(4, 6, **options)
        self.second = kind(width, 5, batch_first=options.get("batch_first", False))
        self.between = nn.Linear(4, 4)
        self.function = forward

    def forward(self, x, lengths):
        return self.function(self, x, lengths)


def pack(x, lengths, **options):
    return pack_padded_sequence(x, lengths, batch_first=True, **{"enforce_sorted": False} | options)


def unpack(packed, **options):
    return pad_packed_sequence(packed, batch_first=True, **options)


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in tensors(part)]


def check(forward, batches, kind=nn.LSTM, exports=2, **options):
    torch.manual_seed(0)
    eager = Recurrent(forward, kind, **options)
    ours = ORTModule(copy.deepcopy(eager))
    for x, lengths in batches:
        sides = []
        for module in (ours, eager):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            results = tensors(module(leaf, lengths))
            floats = [t for t in results if t.is_floating_point()]
            loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view_as(t)).sum() for t in floats)
            loss.backward()
            sides.append([*results, leaf.grad, *(p.grad for p in module.parameters())])
        for found, expected in zip(*sides, strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    report = explain(ours)
    assert report.captured and not report.python_ops and not report.aten_ops, report
    assert report.exports <= exports
    return ours


def sequences(*many, batch_first=True):
    """Batches of padded sequences. No sequence of the second one is as long as the padding."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for lengths, steps in many:
        shape = (len(lengths), steps, 4) if batch_first else (steps, len(lengths), 4)
        batches.append((torch.randn(shape, generator=generator), torch.tensor(lengths)))
    return batches


SORTED = ([7, 4, 4, 1], 7), ([5, 3, 2, 1], 7), ([6, 2, 2], 8), ([7, 7, 7, 7], 7)
UNSORTED = ([4, 7, 1, 4], 7), ([2, 3, 5, 1], 7), ([1, 6, 6], 8), ([3, 3, 7, 3], 7), ([2, 2, 2, 6], 7)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers(kind, both, batch_first):
    def forward(self, x, lengths):
        y, state = self.first(pack_padded_sequence(x, lengths, batch_first=batch_first))
        return *pad_packed_sequence(y, batch_first=batch_first), state

    batches = sequences(*SORTED, batch_first=batch_first)
    check(forward, batches, kind, bidirectional=both, batch_first=batch_first)


FORMS = {
    "state alone": lambda s, x, n: s.first(pack(x, n))[1],
    "one after the other": lambda s, x, n: unpack(s.second(s.first(pack(x, n))[0])[0]),
    "a total length": lambda s, x, n: unpack(s.first(pack(x, n))[0], total_length=x.size(1)),
    "a longer total": lambda s, x, n: unpack(s.first(pack(x, n))[0], total_length=x.size(1) + 2)[0],
    "another padding": lambda s, x, n: unpack(s.first(pack(x, n))[0], padding_value=-1e9)[0].amax(1),
    "packed rows": lambda s, x, n: s.first(pack(x, n))[0].data.cos(),
    "nothing recurrent": lambda s, x, n: unpack(pack(x, n)),
    "a loss of packed rows": lambda s, x, n: F.mse_loss(s.first(pack(x, n))[0].data[:, :4], pack(s.between(x), n).data),
    "given states": lambda s, x, n: s.first(pack(x, n), (x.new_full((1, len(n), 6), 0.3), x.new_ones(1, len(n), 6)))[1],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    check(FORMS[form], sequences(*UNSORTED), exports=4 if form == "given states" else 2, batch_first=True)


def test_rows_that_are_computed_between():
    def forward(self, x, lengths):
        packed = pack(x, lengths)
        rows = self.between(packed.data).relu()
        packed = PackedSequence(rows, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        y, (h, c) = self.first(packed)
        return y.data, h, c, unpack(y)[0]

    check(forward, sequences(*UNSORTED), num_layers=2, bidirectional=True, batch_first=True)


def test_lengths_that_pytorch_refuses():
    """At every call, whatever the lengths before were."""
    ours = check(
        lambda s, x, n: unpack(s.first(pack(x, n, enforce_sorted=True))[0]), sequences(*SORTED), batch_first=True
    )
    x = torch.randn(4, 7, 4)
    for lengths, sentence in (
        ([5, 3, 2, 0], "greater than 0"),
        ([5, 3, 4, 1], "sorted"),
        ([9, 3, 2, 1], "exceeds"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            ours(x, torch.tensor(lengths))


def test_dropout_between_layers():
    """It is PyTorch's layer, inside the graph; its share of zeros reaches the second layer only."""
    torch.manual_seed(0)
    module = Recurrent(lambda s, x, n: unpack(s.first(pack(x, n))[0])[0], num_layers=2, dropout=0.5, batch_first=True)
    ours = ORTModule(copy.deepcopy(module))
    for x, lengths in sequences(*UNSORTED):
        results = []
        for each in (ours, module):
            torch.manual_seed(3)
            results.append(each(x, lengths))
        torch.testing.assert_close(*results)
    assert explain(ours).captured
