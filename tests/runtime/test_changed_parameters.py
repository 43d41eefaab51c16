"""Parameters that forward changes and sparse gradients of embeddings are as in PyTorch.

Moving averages, norms that are bounded. The engine runs the module, or all but the smallest submodule that does so.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each


class Average(nn.Module):
    """A student and a teacher, whose parameters are a moving average."""

    def __init__(self, update, teacher_first=False):
        super().__init__()
        self.student, self.teacher, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.requires_grad_(False)
        self.update, self.teacher_first = update, teacher_first

    def forward(self, x):
        found = []
        if self.teacher_first:
            found.append(self.teacher(x))
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            self.update(p, q)
        with torch.no_grad():
            found.append(self.teacher(x))
        return self.head(self.student(x)) - sum(found)


def by_data(p, q):
    q.data = q.data * 0.9 + p.data * 0.1


def by_operators_in_place(p, q):
    with torch.no_grad():
        q.mul_(0.9).add_(p, alpha=0.1)


def by_data_in_place(p, q):
    q.data.mul_(0.9).add_(p.data, alpha=0.1)


def by_copy(p, q):
    with torch.no_grad():
        q.copy_(q * 0.9 + p * 0.1)


def by_lerp(p, q):
    with torch.no_grad():
        q.lerp_(p, 0.1)


def by_data_twice(p, q):
    q.data = q.data * 0.9
    q.data = q.data + p.data * 0.1


def by_data_and_in_place(p, q):
    q.data = q.data * 0.9
    with torch.no_grad():
        q.add_(p, alpha=0.1)


UPDATES = [by_data, by_operators_in_place, by_data_in_place, by_copy, by_lerp, by_data_twice, by_data_and_in_place]


def train(module, calls, sparse=(), verify=False):
    """Results, gradients and parameters of steps with SGD."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
    found = []
    for number, args in enumerate(calls):
        torch.manual_seed(number)
        optimizer.zero_grad()
        result = module(*args)
        result.square().sum().backward()
        grads = [p.grad for p in module.parameters()]
        found += [result.detach(), *(None if g is None else g.clone() for g in grads)]
        optimizer.step()
        found += [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    return found


def compare(module, calls):
    """Trains a module in PyTorch and its twin in the engine. The twin."""
    twin = ORTModule(copy.deepcopy(module))
    expected, found = train(module, calls), train(twin, calls)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert a.layout == b.layout
            torch.testing.assert_close(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)
    return twin


def batches(*sizes):
    return [(torch.randn(n, 4, generator=torch.Generator().manual_seed(n)),) for n in sizes]


@each("first", (False, True), (False,))
@each("update", UPDATES, (by_data, by_operators_in_place))
def test_moving_average_of_parameters(update, first):
    torch.manual_seed(0)
    report = explain(compare(Average(update, first), batches(2, 5, 1, 5)))
    assert report.captured, report.fallback
    assert (report.exports, report.python_ops) == (1, [])


def test_parameters_stay_parameters_in_their_memory():
    torch.manual_seed(0)
    model = ORTModule(Average(by_operators_in_place))
    weight = model.teacher.weight
    memory = weight.data_ptr()
    for args in batches(2, 3):
        model(*args)
    assert model.teacher.weight is weight and isinstance(weight, nn.Parameter) and weight.data_ptr() == memory


def test_other_memory_is_other_memory():
    """`q.data = ...` leaves what shared the old memory as it was."""
    torch.manual_seed(0)
    model = ORTModule(Average(by_data))
    before = model.teacher.weight.detach()
    then = before.clone()
    for args in batches(2, 3):
        model(*args)
    assert explain(model).captured
    assert torch.equal(before, then) and not torch.equal(model.teacher.weight, then)


class Stopped(nn.Module):
    """A buffer is written where autograd does not look, with a tensor that carries a gradient."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.write(self.kept, self.layer.bias)
        return self.layer(x) * self.kept


WRITES = {
    "add_": lambda kept, bias: kept.mul_(0.9).add_(bias, alpha=0.1),
    "copy_": lambda kept, bias: kept.copy_(bias),
    "an item": lambda kept, bias: kept.__setitem__(slice(1, 3), bias[1:3]),
    "lerp_": lambda kept, bias: kept.lerp_(bias, weight=0.1),
    "addcmul_": lambda kept, bias: kept.addcmul_(tensor1=bias, tensor2=bias),
    "out": lambda kept, bias: torch.add(kept, bias, out=kept),
}


@each("name", WRITES, ("add_",))
def test_no_gradient_through_what_is_written_under_no_grad(name):
    torch.manual_seed(0)
    assert explain(compare(Stopped(WRITES[name]), batches(2, 5))).captured


def shared(p, q):
    q.data = p.data


def changed_later(p, q):
    new = q.data * 0.9
    q.data = new
    new.add_(1)


@pytest.mark.parametrize("update", (shared, changed_later))
def test_data_that_is_shared(update):
    torch.manual_seed(0)
    compare(Average(update), batches(2, 5, 1, 5))


class Bounded(nn.Module):
    """A layer that changes its own parameter."""

    def __init__(self, change):
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.randn(4, 4)), change

    def forward(self, x):
        self.change(self.weight)
        return F.linear(x, self.weight)


def clamped(weight):
    with torch.no_grad():
        weight.clamp_(-0.5, 0.5)


def normalized(weight):
    weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)


def shrunk(weight):
    weight.data.mul_(0.9)


@each("change", (clamped, normalized, shrunk), (normalized,))
def test_layer_that_changes_its_parameter(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), Bounded(change), nn.Tanh(), nn.Linear(4, 4))
    report = explain(compare(model, batches(2, 5, 1, 5)))
    assert report.captured, report.fallback
    assert report.breaks == ["2"]


TABLES = {
    "max_norm": lambda: nn.Embedding(9, 4, max_norm=1.0),
    "max_norm, sparse": lambda: nn.Embedding(9, 4, max_norm=1.0, sparse=True),
    "sparse": lambda: nn.Embedding(9, 4, sparse=True),
    "padding, sparse": lambda: nn.Embedding(9, 4, padding_idx=0, sparse=True),
    "bag, sparse": lambda: nn.EmbeddingBag(9, 4, sparse=True),
    "bag of sums, sparse": lambda: nn.EmbeddingBag(9, 4, mode="sum", sparse=True),
    "bag, max_norm": lambda: nn.EmbeddingBag(9, 4, max_norm=1.0),
}


def indices(*sizes):
    return [(torch.randint(9, (n, 3), generator=torch.Generator().manual_seed(n)),) for n in sizes]


@each("name", TABLES, ("max_norm", "bag, sparse"))
def test_table_that_pytorch_runs(name):
    torch.manual_seed(0)
    model = nn.Sequential(TABLES[name](), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    report = explain(compare(model, indices(2, 5, 1, 5)))
    assert report.captured, report.fallback
    assert report.breaks == ["0"]


class Tied(nn.Module):
    """The table is the last layer's weight, too: gradients of both kinds meet."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, i):
        return F.linear(self.layer(self.table(i)), self.table.weight)


class Within(nn.Module):
    """PyTorch runs the submodule around the table for another reason."""

    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4, sparse=True)

        def forward(self, i):
            return sum(self.table(row) for row in i.unbind()[: 1 + int(i.sum()) % 2 * 0])[None]

    def __init__(self):
        super().__init__()
        self.inner, self.layer = self.Deciding(), nn.Linear(4, 4)

    def forward(self, i):
        return self.layer(self.inner(i))


@each("make", (Tied, Within), (Tied,))
def test_sparse_gradients_elsewhere(make):
    torch.manual_seed(0)
    compare(make().double(), indices(2, 5, 1, 5))


SAME = {
    "layer.to(dtype)": lambda m, x: setattr(m, "first", m.first.to(torch.float32)),
    "self.to(dtype)": lambda m, x: m.to(x.dtype),
    "layer.float()": lambda m, x: m.first.float(),
    "layer.to(device)": lambda m, x: m.first.to(x.device),
    "parameter": lambda m, x: setattr(m.first.weight, "data", m.first.weight.data),
    "buffer": lambda m, x: setattr(m.scale, "data", m.scale.data.to(x.dtype)),
}


class Same(nn.Module):
    """Puts the data into its tensors that they have, as transformers' routers do (`self.classifier.to(self.dtype)`)."""

    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        self.change(self, x)
        return self.last(self.first(x)) * self.scale


@each("name", SAME, ("layer.to(dtype)",))
def test_the_data_that_there_is(name):
    torch.manual_seed(0)
    report = explain(compare(Same(SAME[name]), batches(3, 5, 3)))
    assert report.fallback is None and report.exports == 1
