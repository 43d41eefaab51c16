"""Loops of Python's over a length: captured once for all lengths, and as right as PyTorch."""

import copy
import itertools
import math

import numpy
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.capture import dynamic_dims
from ortmodule.capture.loops import check
from ortmodule.capture.loops.sequence import Literal
from ortmodule.capture.loops.steps import Affine, Number
from ortmodule.capture.loops.writer import Writer
from ortmodule.runtime import compiler
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, LENGTHS = 4, (12, 7, 23, 40, 12)


# --- a family: a cell, a way over the steps, a use of the step's number, a way out ------------------------------------


def lstm(s, x, h, c):
    return s.lstm(x, (h, c))


def gru(s, x, h, c):
    return s.gru(x, h), c


def rnn(s, x, h, c):
    return torch.tanh(s.block(x) + s.mix(torch.cat((h, x), 1))), h


def scan(s, x, h, c):
    """Mamba's."""
    step = nn.functional.softplus(s.linear(x))
    return torch.exp(-step * s.scale.exp()) * h + step * x * s.mix(torch.cat((x, x), 1)), c


def euler(s, x, h, c):
    return h + 0.05 * (torch.sin(s.block(h)) + x), c


CELLS = {f.__name__: f for f in (lstm, gru, rnn, scan, euler)}

STEPS = {
    "range": lambda x: ((t, x[:, t]) for t in range(x.shape[1])),
    "unbind": lambda x: enumerate(x.unbind(1)),
    "split": lambda x: ((t, part.squeeze(1)) for t, part in enumerate(x.split(1, 1))),
    "chunk": lambda x: ((t, part[:, 0]) for t, part in enumerate(x.chunk(x.shape[1], dim=1))),
    "reversed": lambda x: ((t, x[:, t]) for t in reversed(range(x.shape[1]))),
    "slices": lambda x: ((t, x[:, t : t + 1].reshape(x.shape[0], -1)) for t in range(x.size(1))),
    "window": lambda x: ((t, x[:, t - 1] + x[:, t]) for t in range(1, len(x[0]))),
    "transposed": lambda x: enumerate(x.transpose(0, 1)),
    "twice a step": lambda x: ((t, x[:, t] * k) for t in range(x.shape[1]) for k in (1.0, 0.5)),
}


def when_later(s, t, x):
    return x if t > 0 else x * 2


def table(s, t, x):
    return x + s.table[t]


USES = {
    "none": lambda s, t, x: x,
    "number": lambda s, t, x: x + t,
    "tenths": lambda s, t, x: x * (t * 0.1),
    "condition": when_later,
    "table": table,
}

OUT = {
    "last": lambda found, x: found[-1],
    "stack": lambda found, x: torch.stack(found, 1),
    "cat": lambda found, x: torch.cat([h[:, None] for h in found[::-1]], dim=1),
    "sum": lambda found, x: sum(found) / len(found),
    "tuple": lambda found, x: (found[-2], torch.stack(found).amax(0)),
    "second loop": lambda found, x: torch.stack([torch.sin(h) * x.mean(1) for h in found]).mean(0),
}


class Loop(nn.Module):
    def __init__(self, cell, steps, use, out):
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.linear, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.table = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.randn(64, WIDTH))
        self.kinds = cell, steps, use, out

    def forward(self, x):
        cell, steps, use, out = self.kinds
        h = c = x.new_zeros(x.shape[0], WIDTH)
        found = []
        for t, each_x in STEPS[steps](x):
            h, c = CELLS[cell](self, USES[use](self, t, each_x), h, c)
            found.append(h)
        return OUT[out](found, x)


def loss_of(result):
    parts = result if isinstance(result, tuple) else (result,)
    return sum((part * torch.arange(part.numel()).reshape(part.shape).cos()).sum() for part in parts)


def compare(module, lengths, make=lambda n: torch.randn(3, n, WIDTH, dtype=torch.float64), exports=1):
    """Values and gradients over lengths; one export is all that there is."""
    torch.manual_seed(0)
    eager = module.double()
    ours = ORTModule(copy.deepcopy(eager))
    for n in lengths:
        x = make(n)
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        results = [wrapped(given) for wrapped, given in zip((eager, ours), inputs, strict=True)]
        for result in results:
            loss_of(result).backward()
        torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-8, atol=1e-10)
        for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: name + text)
        eager.zero_grad(), ours.zero_grad()
    report = explain(ours)
    assert report.fallback is None, report.fallback
    if exports is not None:
        assert report.exports == exports, report
    return ours


#: Of the family a square: each with each of another part once in a while.
SHORT = {(list(CELLS)[i % 5], list(STEPS)[i % 9], list(USES)[i % 5 - i // 5], list(OUT)[i % 6]) for i in range(11)}


@each("cell, steps, use, out", list(itertools.product(CELLS, STEPS, USES, OUT)), SHORT)
def test_a_loop_is_captured_once(cell, steps, use, out):
    compare(Loop(cell, steps, use, out), LENGTHS)


# --- single situations ------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """``forward``: of the module and its input."""

    def __init__(self, forward):
        super().__init__()
        self.cell, self.linear = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(40))
        self.kind = forward

    def forward(self, x):
        return self.kind(self, x)


def steps(s, x, change=lambda s, t, h: h, first=0):
    h = x.new_zeros(x.shape[0], WIDTH)
    for t in range(first, x.shape[1]):
        h = change(s, t, s.cell(x[:, t], h))
    return h


def test_short_lengths_have_graphs_of_their_own():
    """Fewer steps than those that differ from the rest, down to none, before and after a long one."""
    module = Loop("rnn", "range", "condition", "stack")
    ours = compare(module, (1, 2, 12, 3, 4, 2, 1, 15), exports=None)
    assert 2 <= explain(ours).exports <= 6
    ours(torch.randn(3, 21, WIDTH, dtype=torch.float64))
    assert explain(ours).exports <= 6


@each("when", [20, 300], {20})
def test_what_comes_late_is_seen(when):
    """`if t == 20` is beyond every length that is traced, 300 beyond those that are checked at first."""
    compare(Cell(lambda s, x: steps(s, x, lambda s, t, h: h * 3 if t == when else h)), (9, when + 3, 9), exports=None)


def test_a_gradient_that_is_cut_in_each_16th_step():
    """The values are the same as without."""

    def cut(s, t, h):
        return h.detach() if t % 16 == 15 else h

    compare(Cell(lambda s, x: steps(s, x, cut)), (12, 40, 12), exports=None)


def test_steps_that_alternate_are_captured_by_themselves():
    compare(Cell(lambda s, x: steps(s, x, lambda s, t, h: s.linear(h) if t % 2 else h)), (8, 9, 8), exports=2)


def test_a_layer_for_each_step():
    compare(Cell(lambda s, x: steps(s, x, lambda s, t, h: s.layers[t](h))), (8, 9, 8), exports=2)


def test_two_loops_and_an_inner_one():
    def forward(s, x):
        h = steps(s, x, lambda s, t, h: sum(s.layers[k](h) for k in range(3)))
        return steps(s, x + h[:, None], lambda s, t, h: torch.tanh(s.linear(h)))

    compare(Cell(forward), LENGTHS)


def test_a_condition_about_the_length():
    """It is compared for each length: traces of short ones go one way, long ones the other."""

    def forward(s, x):
        h = steps(s, x)
        return h * 2 if x.shape[1] > 15 else h

    compare(Cell(forward), (8, 20, 12, 30), exports=None)


def test_carried_values_in_containers():
    def forward(s, x):
        state = {"h": (x[:, 0], [x.mean(1)]), "n": 0}
        for _, part in enumerate(x.unbind(1)):
            h, (m,) = state["h"]
            state = {"h": (s.cell(part, h), [m * 0.5 + h]), "n": state["n"] + 1}
        return state["h"][0] + state["h"][1][0] / state["n"]

    compare(Cell(forward), LENGTHS)


def test_while_a_number_is_less():
    def forward(s, x):
        h, t = x[:, 0], 0
        while t < x.shape[1]:
            h = s.cell(x[:, t], h)
            t += 1
        return h

    compare(Cell(forward), LENGTHS)


def test_a_result_that_is_written_step_by_step():
    def forward(s, x):
        out, h = torch.zeros_like(x), x[:, 0]
        for t in range(x.shape[1]):
            h = s.cell(x[:, t], h)
            out[:, t] = h
        return out

    compare(Cell(forward), (12, 7, 23))


def test_a_decision_about_data_in_each_step():
    compare(Cell(lambda s, x: steps(s, x, lambda s, t, h: h if h.sum() < 1e9 else h * 2)), (8, 9, 8), exports=None)


def test_a_stop_by_data():
    def forward(s, x):
        h = x[:, 0]
        for t in range(x.shape[1]):
            h = s.cell(x[:, t], h)
            if x[:, t].sum() > 2:
                break
        return h

    compare(Cell(forward), (8, 9, 8, 14), exports=None)


def test_a_loop_over_the_batch():
    compare(
        Cell(lambda s, x: torch.stack([torch.tanh(s.linear(row)).mean(0) for row in x])),
        (7, 12, 9),
        make=lambda n: torch.randn(n, 3, WIDTH, dtype=torch.float64),
    )


def test_each_step_drops_by_itself():
    ours = ORTModule(Cell(lambda s, x: torch.stack([nn.functional.dropout(part) for part in x.unbind(1)], 1)))
    masks = []
    for n in (8, 30, 17):
        kept = ours(torch.ones(4, n, 64)) != 0
        masks.append(kept)
        assert len({tuple(kept[:, t].flatten().tolist()) for t in range(n)}) == n
        assert 0.4 < kept.float().mean() < 0.6
    assert explain(ours).exports == 1
    torch.manual_seed(5)
    first = ours(torch.ones(4, 30, 64))
    torch.manual_seed(5)
    assert torch.equal(first, ours(torch.ones(4, 30, 64)))


def test_lengths_of_two_inputs_that_are_not_alike():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x, y):
            h = y.mean(1)
            for part in x.unbind(1):
                h = self.cell(part, h)
            return h

    torch.manual_seed(0)
    eager = Two().double()
    ours = ORTModule(copy.deepcopy(eager))
    for n, m in ((9, 9), (9, 5), (14, 14), (20, 3)):
        x, y = (torch.randn(3, k, WIDTH, dtype=torch.float64) for k in (n, m))
        torch.testing.assert_close(ours(x, y), eager(x, y))
    assert explain(ours).fallback is None


def test_attributes_are_guarded_as_in_other_graphs():
    def forward(s, x):
        return steps(s, x, lambda s, t, h: h * s.factor)

    torch.manual_seed(0)
    eager = Cell(forward).double()
    ours = ORTModule(copy.deepcopy(eager))
    for factor in (0.5, 2.0, 0.5):
        for n in (8, 13):
            eager.factor = ours.factor = factor
            x = torch.randn(3, n, WIDTH, dtype=torch.float64)
            torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).exports == 2


def test_a_thousand_steps_cost_little(monkeypatch):
    """What captures run of an LSTM's cell is short traces, and checks that are about as long as the call: no unrolled
    trace of it. Another length runs nothing of it, and what captures take is shown."""
    traced, checked, searched = [], [], []
    trace, run, cuts = dynamic_dims.trace, check.LoopCheck._run, compiler.data_cuts
    monkeypatch.setattr(compiler, "data_cuts", lambda *given: (searched.append(given), cuts(*given))[1])
    monkeypatch.setattr(dynamic_dims, "trace", lambda *given: (traced.append(given[4][0].shape[1]), trace(*given))[1])
    monkeypatch.setattr(check.LoopCheck, "_run", lambda self, n, given: (checked.append(n), run(self, n, given))[1])
    ours = compare(Loop("lstm", "range", "none", "last"), (1000,))
    assert max(traced) <= 12 and len(traced) <= 12
    assert 1000 <= max(checked) <= 2000 and sum(checked) <= 5000
    traced.clear(), checked.clear(), searched.clear()
    report = explain(ours)
    assert report.capture_seconds == report.first_capture_seconds > 0
    for n in (900, 1000):
        ours(torch.randn(3, n, WIDTH, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert not traced and not checked and not searched
    assert explain(ours).pytorch_calls == report.pytorch_calls
    assert explain(ours).capture_seconds == report.capture_seconds
    assert "time       capture" in str(explain(ours))


def test_long_loops_that_no_template_is_for_take_their_share(monkeypatch):
    """Each length is another graph: what captures of all but the first take stays within a tenth of the steps' time."""
    monkeypatch.delenv("ORTMODULE_CAPTURE_SHARE", raising=False)
    ours = ORTModule(Cell(lambda s, x: steps(s, x, lambda s, t, h: s.linear(h) if t % 2 else h)))
    for n in range(40, 52):
        ours(torch.randn(2, n, WIDTH)).sum().backward()
    report = explain(ours)
    assert report.exports == 1 and report.pytorch_calls == 11
    assert report.capture_seconds - report.first_capture_seconds <= 0.1 * report.step_seconds
    assert sum(not variant.captured for variant in report.variants) == 11


# --- the bytes of a graph ---------------------------------------------------------------------------------------------

LITERALS = [
    Literal(TensorProto.INT64, numpy.array(37)),  # "%" in the bytes of what is written
    Literal(TensorProto.INT64, numpy.array([0x25303564])),
    Literal(TensorProto.FLOAT, numpy.array([1.5, -0.0, numpy.nan], numpy.float32)),
    Literal(TensorProto.DOUBLE, numpy.zeros((2, 3))),
    Literal(TensorProto.FLOAT, numpy.zeros(0, numpy.float32)),
    Literal(TensorProto.BOOL, numpy.ones(300, numpy.bool_)),
    Literal(TensorProto.INT64, numpy.array([36])),
]


def test_constants_of_a_written_graph():
    """Each is there once, under the name that was given for it, with its bytes."""
    writer = Writer(5)
    names = [writer.constant(each) for each in LITERALS]
    assert names == [writer.constant(each) for each in LITERALS] and len(set(names)) == len(LITERALS)
    nodes = writer.finished(onnx.ModelProto()).graph.node
    assert [node.op_type for node in nodes] == ["Constant"] * len(LITERALS)
    assert [list(node.output) for node in nodes] == [[name] for name in names] == [[node.name] for node in nodes]
    for node, literal in zip(nodes, LITERALS, strict=True):
        (attribute,) = node.attribute
        value = numpy_helper.to_array(onnx.helper.get_attribute_value(attribute))
        assert (value.dtype, value.shape) == (literal.value.dtype, literal.value.shape)
        assert value.tobytes() == literal.value.tobytes()


RANGES = (range(0, 9), range(2, 3), range(5, 5))


def test_numbers_of_many_steps():
    for number in (Affine(3, 2, -1), Affine(-4, -3), Affine(7), Affine(0, 1, 2)):
        for numbers in (*RANGES, range(9, 0, -2)):
            assert list(number.of(numbers, 11)) == [number.at(i, 11) for i in numbers]


@pytest.mark.parametrize("factor", [None, 0.1])
@pytest.mark.parametrize("kind", [numpy.float32, numpy.float16, numpy.int64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 2), (0,)])
def test_constants_of_many_steps(factor, kind, shape):
    """The bytes are those of each step alone."""
    start, step, length = numpy.random.default_rng(0).integers(-9, 9, (3, math.prod(shape)))
    kind = numpy.dtype(kind)
    number = Number(0, kind, shape, start, step, length, factor if kind.kind == "f" else None)
    for numbers in RANGES:
        assert number.bytes_of(numbers, 11) == [number.at(i, 11).value.tobytes() for i in numbers]
