"""Which sizes a captured graph serves, and in how many traces that is found out."""

import copy
import logging
import math
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each, half
from tests.twins import Pair, rows

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("first", [(1, 5, 4), (2, 5, 4), (8, 8, 4), (4, 4, 4), (3, 40, 4)])
def test_any_size_is_one_graph(first):
    pair = Pair(lambda self, x: self.linear(x).softmax(1).sum(-1))
    pair.check(rows(*first))
    for shape in ((2, 7, 4), (5, 3, 4), (1, 9, 4), (6, 1, 4), (1, 1, 4)):
        report = pair.check(rows(*shape))
    assert report.exports == 1 and report.plans == 6


@pytest.mark.parametrize(
    "view",
    [lambda y: y, lambda y: y.transpose(0, 1), lambda y: y.permute(2, 0, 1), lambda y: y[:, 1:], lambda y: y[..., 0]],
    ids=["whole", "transposed", "permuted", "part", "column"],
)
def test_strides_are_those_in_memory(view):
    def forward(self, x):
        y = view(self.linear(x))
        strides = y.stride()
        return y.as_strided((2, *y.shape[1:]), (max(strides[0] // 2, 1), *strides[1:])).cos()

    pair = Pair(forward)
    for shape in ((6, 4, 4), (8, 4, 4)):
        found, expected = pair.ours(rows(*shape)), pair.eager(rows(*shape))
        torch.testing.assert_close(found, expected)
    assert explain(pair.ours).captured == (view(torch.zeros(6, 4, 4)).numel() == 96)


def test_a_loop_over_a_size():
    """It is unrolled, by the engine: one export for all lengths and batches."""

    def forward(self, x):
        total = torch.zeros(x.shape[0], 4)
        for i in range(x.shape[1]):
            total = total * 0.5 + self.linear(x[:, i])
        return total

    pair = Pair(forward)
    for shape in ((3, 5, 4), (7, 5, 4), (3, 6, 4), (2, 6, 4), (5, 5, 4)):
        assert pair.check(rows(*shape)).exports == 1


@pytest.mark.parametrize(
    "size", [lambda x: len(x), lambda x: int(x.shape[0]), lambda x: x.shape.numel(), lambda x: float(x.size(0))]
)
def test_a_size_as_a_number(size):
    pair = Pair(lambda self, x: self.linear(x) / size(x))
    for n in (3, 5, 3, 1):
        pair.check(rows(n, 4))


def test_a_decision_about_a_size():
    def forward(self, x):
        return self.linear(x) if x.shape[1] > 20 else self.linear(x) * 2

    pair = Pair(forward)
    assert pair.check(rows(2, 5, 4)).exports == 1
    assert pair.check(rows(2, 19, 4)).exports == 1
    assert pair.check(rows(2, 30, 4)).exports == 2
    assert pair.check(rows(3, 25, 4)).exports == 2
    assert pair.check(rows(2, 9, 4)).exports == 2


def test_a_decision_about_one():
    pair = Pair(lambda self, x: self.linear(x).squeeze(0))
    for n, exports in ((3, 1), (1, 2), (5, 2), (1, 2)):
        assert pair.check(rows(n, 4)).exports == exports


def test_features_that_happen_to_be_as_many_as_rows():
    pair = Pair(lambda self, x: self.linear(x))
    assert pair.check(rows(4, 4)).exports == 1
    assert pair.check(rows(9, 4)).exports == 1


def test_square_masks_vary_together():
    pair = Pair(lambda self, x, mask: (x @ x.transpose(1, 2)).masked_fill(mask, -1e9).softmax(-1) @ self.linear(x))
    for n, length in ((2, 5), (3, 7), (2, 2)):
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        assert pair.check(rows(n, length, 4), mask).exports == 1


def test_channels_are_pinned_and_space_is_not():
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    for shape in ((2, 3, 8, 8), (3, 3, 12, 9), (1, 3, 5, 5)):
        torch.testing.assert_close(ours(rows(*shape)), eager(rows(*shape)))
    assert explain(ours).captured and explain(ours).exports == 1


def test_forward_is_traced_no_more_than_it_takes(caplog):
    """On images, all sizes, then all but the channels; a setting that forward finds out takes no trace of its own."""
    log = logging.getLogger("tests.sizes")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.config = nn.Conv2d(3, 4, 3), SimpleNamespace(kind=None)

        def forward(self, x):
            log.warning(f"{x.shape[0]}x{x.shape[1]}x{x.shape[2]}x{x.shape[3]}")
            if self.config.kind is None:
                self.config.kind = "mean"
            return self.convolution(x).mean((2, 3))

    ours = ORTModule(Net())
    ours(rows(2, 3, 8, 8))
    assert explain(ours).captured and ours.config.kind == "mean"
    met = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert met == ["2x3x8x8", "5x5x12x12", "5x3x12x12", "2x3x8x8"]  # the last one is the check


def test_the_exporter_needs_a_size():
    eager = nn.Sequential(nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten(), nn.Linear(18, 2))
    ours = ORTModule(copy.deepcopy(eager))
    for shape, exports in (((2, 3, 8, 8), 1), ((4, 3, 8, 8), 1), ((2, 3, 7, 9), 2)):
        torch.testing.assert_close(ours(rows(*shape)), eager(rows(*shape)))
        assert explain(ours).captured and explain(ours).exports == exports


def test_sizes_in_the_result_are_numbers():
    def forward(self, x):
        return {"y": self.linear(x), "n": x.shape[0] * 2 + 1, "long": x.shape[1] > 5, "tensor": torch.tensor(3)}

    pair = Pair(forward)
    for length in (4, 9):
        found = pair.ours(rows(3, length, 4))
        assert found["n"] == 7 and type(found["n"]) is int and found["long"] is (length > 5)
        assert isinstance(found["tensor"], torch.Tensor)


def test_ends_that_are_sizes_and_a_single_step():
    """What lies between two ends that are one and the same is no division by zero."""

    def forward(self, x):
        n = x.shape[1]
        return self.linear(x) * torch.linspace(0.5, n - 0.5, n)[:, None] / n

    pair = Pair(forward)
    for n in (6, 1, 5, 2):
        report = pair.check(rows(3, n, 4))
    assert report.exports == 1


# --- sizes that data decides ------------------------------------------------------------------------------------------

BY_DATA = {
    "slice": lambda x, n: x[:, : n.max()],
    "slices": lambda x, n: x[-n.max() :, n.min() :: n[0]],
    "narrow": lambda x, n: x.narrow(1, n[1], 1),
    "zeros": lambda x, n: torch.cat([x, x.new_zeros(x.size(0), n.max(), 4)], 1),
    "expand": lambda x, n: x.mean(1, keepdim=True).expand(-1, n.sum(), -1),
    "mask": lambda x, n: x * (torch.arange(5)[None] < n[:1, None]).unsqueeze(-1),
    "range": lambda x, n: x.sum((0, 1)) * torch.arange(n.max()).sum(),
    "largest": lambda x, n: x.topk(k=n.min(), dim=1)[0],
    "one number in two places": lambda x, n: x[:, : n.max()] * x.new_ones(x.size(0), n.max(), 4),
    "elements of a mask": lambda x, n: x[x.new_zeros(8, 5).index_fill(0, n, 1.0)[: x.size(0)] > 0],
}


@pytest.mark.parametrize("name", BY_DATA)
def test_sizes_that_data_decides(name):
    """One graph, whatever they are."""
    pair = Pair(lambda self, x, n: BY_DATA[name](self.linear(x), n))
    for shape, numbers in (((3, 5, 4), [2, 3]), ((3, 5, 4), [4, 1]), ((6, 5, 4), [1, 4]), ((3, 5, 4), [4, 1])):
        report = pair.check(rows(*shape), torch.tensor(numbers))
    assert report.captured and report.exports == 1 and not report.aten_ops


def count(x, chosen):
    return x[chosen].mean(0) * 2 if x[chosen].shape[0] > 3 else x[chosen].sum(0)


def none_chosen(x, chosen):
    places = chosen.nonzero().flatten()
    return x.sum() if len(places) == 0 else x[places].square().mean()


def sliced(x, chosen):
    y = x[: chosen.sum()]
    return y.sum(0) if y.shape[0] > 3 else y.cos().sum(0)


def different(x, chosen):
    found = torch.unique(chosen.long() * 3 + torch.arange(8) % 2)
    return x.sum() * found.numel() if found.numel() > 2 else x.sum()


def through_more(x, chosen):
    y = torch.cat([x[chosen], x[:1]]).relu().transpose(0, 1)
    return y.sum(1) if y.size(1) % 2 else y.prod(1)


@pytest.mark.parametrize("forward", [count, none_chosen, sliced, different, through_more])
def test_a_decision_about_a_size_that_data_decides(forward):
    pair = Pair(lambda self, x, chosen: forward(self.linear(x), chosen))
    for many in (6, 2, 5, 0 if forward is none_chosen else 1, 8, 3):
        report = pair.check(rows(8, 4), torch.arange(8) < many)
    assert report.exports <= 3 or forward is none_chosen  # len() is a number of Python's


OF_WHAT_IS_RANDOM = {
    "index": lambda x, chosen: x[chosen],
    "masked_select": lambda x, chosen: x.masked_select(chosen[:, None]),
    "repeat_interleave": lambda x, chosen: x.repeat_interleave(chosen.long(), 0),
}


@pytest.mark.parametrize("name", OF_WHAT_IS_RANDOM)
def test_a_size_of_random_numbers_is_not_random(name):
    """Dropout, and behind it as many elements as a mask says, as in the loss of ELECTRA."""

    def forward(self, x, chosen):
        y = OF_WHAT_IS_RANDOM[name](x + 0 * nn.functional.dropout(self.linear(x), 0.5), chosen)
        assert y.shape == OF_WHAT_IS_RANDOM[name](x, chosen).shape
        return y.square().mean() + self.linear(x).sum()

    pair = Pair(forward)
    for many in (6, 2, 5, 8):
        report = pair.check(rows(8, 4), torch.arange(8) < many)
    assert report.captured


NUMBERS = {
    "divmod": lambda y: y * divmod(y.shape[1], 3)[0] + divmod(100, y.shape[0])[1],
    "round": lambda y: y[:, : round(y.shape[1] / 2)] * round(y.shape[0] / 3, 1) + round(y.shape[1]),
    "ceil": lambda y: y[:, : math.ceil(y.shape[1] / 3)] * math.floor(y.shape[0] / 2),
    "trunc": lambda y: y + math.trunc(y.shape[1] * 0.7),
    "int": lambda y: y[:, : int(y.shape[1] * 0.29) + 1],  # 28.999999999999996 of 100
    "index": lambda y: y[:, torch.arange(y.shape[1])[: int(y.shape[1] * (1 - 0.3))]],
    "float": lambda y: y * float(y.shape[1] * 0.7) * math.sqrt(y.shape[1] * 0.3),
    "quotient": lambda y: y * int(49 / y.shape[1]) + int(49 / y.shape[1] * y.shape[1]),
    "inverse": lambda y: y * int(1 / y.shape[1] * 49),
    "large": lambda y: y * int(y.shape[1] * 16777217 * 1.0 % 1000),
    "equal": lambda y: y * (2 if y.shape[1] * 0.1 * 3 == 0.3 * y.shape[1] else 3),
    "greater": lambda y: y * (2 if y.shape[1] * 0.7 > 6.3 else 3),
    "elements": lambda y: y * int(y.numel() * 0.01),
}


@each("name", NUMBERS, half(NUMBERS))
def test_python_computes_with_sizes_as_it_does_without_a_trace(name):
    """There they are tensors, which have no divmod, and fractions of float32."""
    pair = Pair(lambda self, x: NUMBERS[name](self.linear(x)))
    for length in (7, 8, 9, 10, 49, 98, 100):
        report = pair.check(rows(2, length, 4))
    assert report.captured


def in_place(y, change):
    n = before = y.shape[1]
    n = change(n)
    return y * before + n


CHANGES = {"+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv}
CHANGES |= {"//=": operator.ifloordiv, "%=": operator.imod, "**=": operator.ipow}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("by", [2, 0.5])
def test_a_number_that_is_changed_leaves_its_copies(change, by):
    pair = Pair(lambda self, x: in_place(self.linear(x), lambda n: change(n, by)))
    for shape in ((2, 7, 4), (3, 8, 4), (2, 9, 4)):
        report = pair.check(rows(*shape))
    assert report.captured and report.exports == 1


@pytest.mark.parametrize("of", [round, math.trunc, lambda y: divmod(y, 2), lambda y: divmod(7, y)])
def test_tensors_are_no_numbers(of):
    pair = Pair(lambda self, x: self.linear(x) * of(x.sum()))
    for model in pair.eager, pair.ours:
        with pytest.raises(TypeError):
            model(rows(2, 4))


def number_of_turns(x, chosen):
    y = x[chosen]
    return sum(y[i] * (i + 1) for i in range(y.shape[0]))


def maybe_squeezed(x, chosen):
    y = x[chosen.nonzero().squeeze()]
    return y.sum(0) if y.dim() == 2 else y * 3


@pytest.mark.parametrize("forward", [number_of_turns, maybe_squeezed])
@pytest.mark.parametrize("counts", [(1, 3, 2), (3, 1, 2), (2, 5, 1)])
def test_a_form_that_data_decides(forward, counts):
    """It is right, in the engine or in PyTorch."""
    pair = Pair(lambda self, x, chosen: forward(self.linear(x), chosen))
    for many in counts:
        operands = rows(8, 4), torch.arange(8) < many
        torch.testing.assert_close(pair.ours(*operands), pair.eager(*operands))
