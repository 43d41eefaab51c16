"""Numbers that Python takes out of data: one graph for all values, whatever Python does with them."""

import functools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

#: How Python takes the number out of a tensor of rank 0 (integers).
READS = {
    "item": lambda n: n.item(),
    "int": lambda n: int(n),
    "int_of_item": lambda n: int(n.item()),
    "list": lambda n: n.reshape(1).tolist()[0],
    "float": lambda n: int(float(n) + 0.5),
    "round": lambda n: round(n.float().item()),
    "computed": lambda n: (n.item() * 3 + 3) // 3 - 1,
}


def _write(m, h, n):
    m.ring[n - 1 : n - 1 + h.shape[0]] = h[:, 0].detach()
    m.pointer[...] = n - 1
    return h @ m.ring.clone().t()


def _narrow_write(m, h, n):
    m.ring.narrow(0, n - 1, h.shape[0]).mul_(0.5).add_(h[:, 0].detach())
    return h @ m.ring.clone().t()


def _fill(m, h, n):
    mask = torch.zeros_like(h[0, :, 0])
    mask[:n] = 1
    return h * mask[:, None]


def _set_row(m, h, n):
    h = h.clone()
    h[:, n - 1] = 0
    return h


#: What it does with it: a module, its activations [batch, length, 4], the number, from 1 to the length.
USES = {
    "end": lambda m, h, n: h[:, :n],
    "begin": lambda m, h, n: h[:, n - 1 :],
    "window": lambda m, h, n: h[:, n - 1 : n],
    "from_the_end": lambda m, h, n: h[:, -n:],
    "index": lambda m, h, n: h[:, n - 1],
    "index_from_the_end": lambda m, h, n: h[:, -n],
    "factor": lambda m, h, n: h * n + 1 / n,
    "exponent": lambda m, h, n: h.abs() ** n,
    "zeros": lambda m, h, n: torch.zeros(n, 4) + h.mean((0, 1)),
    "full": lambda m, h, n: h + torch.full((4,), n * 0.5),
    "tensor": lambda m, h, n: h * torch.tensor([n, 1.0, 2 * n, 0.5]),
    "arange": lambda m, h, n: h.sum() * torch.arange(n),
    "one_hot": lambda m, h, n: nn.functional.one_hot(torch.tensor([0, 0]), n).float() * h.sum(),
    "narrow": lambda m, h, n: h.narrow(1, 0, n),
    "narrow_window": lambda m, h, n: h.narrow(dim=-2, start=n - 1, length=1),
    "narrow_write": _narrow_write,
    "repeat": lambda m, h, n: h[:, 0].repeat_interleave(n, 0),
    "expand": lambda m, h, n: h[:, :1].expand(-1, n, -1),
    "view": lambda m, h, n: h[:, :n].reshape(-1, n * 4),
    "pad": lambda m, h, n: nn.functional.pad(h, (0, 0, 0, n)),
    "split": lambda m, h, n: h[:, :n].split([n - 1, 1], 1)[1],
    "clamp": lambda m, h, n: h.clamp(max=n / 10),
    "fill": lambda m, h, n: h.masked_fill(h > 0, n),
    "fill_part": _fill,
    "set_row": _set_row,
    "write": _write,
}
#: The number of each call, of `length`.
VALUES = {
    "changing": lambda i, length: 1 + i * 7 % length,
    "the_same": lambda i, length: 3,
    "extreme": lambda i, length: 1 if i % 2 else length,
}
PAIRS = [(read, use, values) for read in READS for use in USES for values in VALUES]
SHORT = {
    ("item", "end", "changing"), ("int", "end", "extreme"), ("int", "write", "changing"),
    ("item", "factor", "the_same"), ("list", "split", "changing"), ("int_of_item", "zeros", "the_same"),
    ("round", "index", "changing"), ("float", "one_hot", "changing"), ("computed", "tensor", "changing"),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, read, use):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.use, self.layer = read, use, nn.Linear(4, 4)
        self.register_buffer("ring", torch.zeros(24, 4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x, n):
        return self.use(self, self.layer(x), self.read(n.max()))


def _step(model, x, n):
    """What a call gives, and leaves behind: results, gradients, buffers; or the error's text."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    try:
        result = model(x, n)
        result.square().sum().backward()
    except (IndexError, RuntimeError, ValueError, ZeroDivisionError) as error:
        return str(error)
    # (torch leaves None where a result does not depend on it, the engine zeros.)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (x, *model.parameters())]
    return [result.detach(), *grads, *[b.clone() for b in model.buffers()]]


def _compare(one, other, calls, exports=1):
    wrapped = ORTModule(other)
    for x, n in calls:
        expected, found = _step(one, x, n), _step(wrapped, x, n)
        if isinstance(expected, str):
            assert found == expected
            continue
        assert not isinstance(found, str), found
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b, a)
    assert explain(wrapped).exports == exports
    assert explain(wrapped).captured


def _calls(values, count=5, first=6):
    for i in range(count):
        torch.manual_seed(i)
        length, batch = first + i, 3 + i % 2
        most = values(i, length)
        yield torch.randn(batch, length, 4), torch.cat([torch.tensor([most]), torch.randint(1, most + 1, (batch - 1,))])


@each("read, use, values", PAIRS, SHORT)
def test_one_graph_for_all_values(read, use, values):
    pair = [Model(READS[read], USES[use]) for _ in range(2)]
    _compare(*pair, _calls(VALUES[values]))


@pytest.mark.parametrize(
    "use",
    [
        "index",
        "index_from_the_end",
        "zeros",
        "one_hot",
        "narrow",
        "narrow_window",
        "narrow_write",
        "write",
        "window",
        "split",
        "expand",
        "repeat",
    ],  # fmt: skip
)
def test_errors_and_numbers_out_of_range_are_pytorchs(use):
    one, other = (Model(READS["int"], USES[use]) for _ in range(2))
    wrapped = ORTModule(other)
    for most in (4, 5, 40, -3, 0, 3):
        torch.manual_seed(most + 3)
        x, n = torch.randn(3, 6, 4), torch.tensor([most, most, most])
        expected, found = _step(one, x, n), _step(wrapped, x, n)
        assert isinstance(found, str) == isinstance(expected, str), (most, expected, found)
        if isinstance(expected, str):
            assert found == expected
        else:
            torch.testing.assert_close(found, expected)


def test_a_comparison_alone_is_compared():
    """Two ways through Python, two graphs, for any number of values."""
    pair = [Model(READS["item"], lambda m, h, n: h[:, :n] if n > 4 else h * n) for _ in range(2)]
    _compare(*pair, _calls(VALUES["changing"], 12), exports=2)


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_without_gradients(mode):
    one, other = (Model(READS["int"], USES["end"]) for _ in range(2))
    wrapped = ORTModule(other)
    one.train(mode != "eval"), wrapped.train(mode != "eval")
    with torch.no_grad():
        for x, n in _calls(VALUES["changing"]):
            torch.testing.assert_close(wrapped(x, n), one(x, n))
    assert explain(wrapped).exports == 1


class Parts(nn.Module):
    """Sequences of one batch, by themselves."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.layer = way, nn.Linear(4, 4)

    def forward(self, x, n):
        lengths = n.tolist()
        if self.way == "split":
            return sum(p.tanh().mean() for p in self.layer(x.flatten(0, 1)[: int(n.sum())]).split(lengths))
        rows = [x[i, :length] for i, length in enumerate(lengths)]
        return self.layer(nn.utils.rnn.pad_sequence(rows, batch_first=self.way == "pad_first"))


@pytest.mark.parametrize("way", ["split", "pad", "pad_first"])
def test_lists_of_lengths(way):
    calls = [(x[:3], n[:3]) for x, n in _calls(VALUES["changing"], 7)][2:]
    _compare(Parts(way), Parts(way), calls)


def _in_a_function(y, n):
    def part(i):
        return y[i, : int(n[i])].mean(0)

    return torch.stack([part(i) for i in range(y.shape[0])])


def _in_a_generator(y, n):
    def parts():
        for i in range(y.shape[0]):
            yield y[i, : round(n[i].item())].mean(0)

    return torch.stack(list(parts()))


def _in_two_functions(y, n):
    def lengths():
        def one(i):
            return int(n[i])

        return {i: one(i) for i in range(y.shape[0])}

    return torch.stack([y[i, :k].mean(0) for i, k in lengths().items()])


def _length(n, i):
    return int(n[i])


#: Where Python converts a number: code that is made anew in each call is inside of the code around it.
PLACES = {
    "list": lambda y, n: torch.stack([y[i, : int(n[i])].mean(0) for i in range(y.shape[0])]),
    "generator_expression": lambda y, n: torch.stack(tuple(y[i, : int(n[i])].mean(0) for i in range(y.shape[0]))),
    "dictionary": lambda y, n: sum({i: y[i, : int(n[i])].mean(0) * (i + 1) for i in range(y.shape[0])}.values()),
    "lambda": lambda y, n: torch.stack(list(map(lambda i: y[i, : int(n[i])].mean(0), range(y.shape[0])))),
    "loops_in_loops": lambda y, n: torch.stack([y[j, : int(n[j]) + i].sum(0) for i in (0, 1) for j in range(len(y))]),
    "function": _in_a_function,
    "generator": _in_a_generator,
    "functions": _in_two_functions,
    "helper": lambda y, n: torch.stack([y[i, : _length(n, i)].mean(0) for i in range(y.shape[0])]),
    "partial": lambda y, n: torch.stack([y[i, : functools.partial(_length, n)(i)].mean(0) for i in range(len(y))]),
}


class Means(nn.Module):
    def __init__(self, place):
        super().__init__()
        torch.manual_seed(0)
        self.place, self.layer = place, nn.Linear(4, 4)

    def forward(self, x, n):
        return self.place(self.layer(x), n)


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_is_converted(place):
    calls = [(x[:3], n[:3]) for x, n in _calls(VALUES["changing"])]
    _compare(Means(PLACES[place]), Means(PLACES[place]), calls)


class Graph(nn.Module):
    """A graph network: the number of graphs is the largest of the batch's numbers and one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x, batch):
        count = int(batch.max()) + 1
        h = self.layer(x)
        sums = h.new_zeros(count, 4).index_add(0, batch, h)
        return sums / torch.zeros(count).index_add(0, batch, torch.ones_like(h[:, 0])).clamp(min=1)[:, None]


def test_the_number_of_graphs_is_a_size():
    def calls():
        for i, count in enumerate((4, 4, 4, 6, 2)):
            torch.manual_seed(i)
            nodes = 9 + 3 * i
            yield torch.randn(nodes, 4), torch.cat([torch.arange(count), torch.randint(count, (nodes - count,))])

    _compare(Graph(), Graph(), calls())


class Ring(nn.Module):
    """Momentum contrast: keys of earlier batches, and a pointer that goes round."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("queue", torch.randn(4, 12))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x, n):
        keys = self.layer(x)
        logits = keys @ self.queue.clone()
        pointer = int(self.pointer)
        self.queue[:, pointer : pointer + keys.shape[0]] = keys.detach().T
        self.pointer[0] = (pointer + keys.shape[0]) % 12
        return logits


def test_a_pointer_goes_round():
    torch.manual_seed(0)
    _compare(Ring(), Ring(), [(torch.randn(4, 4), None) for _ in range(8)])


def test_plans_of_a_pointer():
    """A write where a pointer is takes no plan for each of its values."""
    model = ORTModule(Ring())
    for _ in range(8):
        model(torch.randn(4, 4), None)
    assert explain(model).plans <= 4


@pytest.mark.parametrize(
    "use",
    [
        lambda m, h, n: sum(h for _ in range(n)),
        lambda m, h, n: h * [1, 2, 3, 4, 5, 6, 7, 8][n % 8],
        lambda m, h, n: h * {3: 5, 4: 7, 5: 2}[n],
    ],
    ids=["range", "list", "dictionary"],
)  # fmt: skip
def test_what_python_takes_a_number_for_is_compared(use):
    """One graph for each value: right, if not fast."""
    one, other = (Model(READS["item"], use) for _ in range(2))
    wrapped = ORTModule(other)
    for most in (3, 4, 3, 4, 5):
        torch.manual_seed(most)
        x, n = torch.randn(3, 6, 4), torch.tensor([most, 1, 1])
        torch.testing.assert_close(_step(wrapped, x, n), _step(one, x, n))


#: What is to have all digits of a float64 tensor beside a fraction that Python computes.
DIGITS = {
    "masked_fill": lambda h, n: h.masked_fill(h > 0, n),
    "where": lambda h, n: torch.where(h > 0, h, n),
    "where, first": lambda h, n: torch.where(h > 0, n, h),
    "clamp": lambda h, n: h.clamp(max=n),
    "lerp": lambda h, n: torch.lerp(h, h * 2, n),
    "full": lambda h, n: h * torch.full((4,), n, dtype=h.dtype),
    "full_like": lambda h, n: h * torch.full_like(h, n),
    "new_full": lambda h, n: h * h.new_full((4,), n),
    "fill_": lambda h, n: h * torch.zeros_like(h).fill_(n),
    "tensor": lambda h, n: h * torch.tensor([n] * 4, dtype=h.dtype),
    "factor": lambda h, n: h * n,
    "exponent": lambda h, n: h.abs() ** n,
    "Python's code": lambda h, n: nn.functional.hardtanh(h, -1.0, n) + nn.functional.threshold(h, 0.0, 1.0) * n,
}


@pytest.mark.parametrize("use", DIGITS)
def test_all_digits_of_a_wide_tensor(use):
    torch.manual_seed(0)
    eager = Model(lambda n: n.item() / 3, lambda m, h, n: DIGITS[use](h, n)).double()
    ours = ORTModule(Model(eager.read, eager.use).double())
    for i in range(3):
        x, n = torch.randn(2 + i, 3, 4, dtype=torch.float64), torch.tensor([1 + i, 1])
        torch.testing.assert_close(ours(x, n), eager(x, n), rtol=1e-13, atol=1e-13)
    assert explain(ours).captured
