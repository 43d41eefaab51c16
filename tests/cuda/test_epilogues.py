"""What cuBLASLt computes on a product's way into memory: GELU, its slope, totals (csrc/passes/product_epilogue.c)."""

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

from ortmodule import ORTModule, _core
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import aligned
from tests.cuda.test_products import compare, session
from tests.ops.harness import dtype_name

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
#: Of fake_blas.c.
BIAS, GELU, GELU_BIAS, GELU_EXTRA, GELU_EXTRA_BIAS, SLOPE, SLOPE_TOTALS = 4, 32, 36, 160, 164, 192, 208
RIGHT_TOTALS, LEFT_TOTALS = 256, 512
EVERY = (GELU, GELU_BIAS, GELU_EXTRA, GELU_EXTRA_BIAS, SLOPE, SLOPE_TOTALS, RIGHT_TOTALS, LEFT_TOTALS)


@pytest.fixture(params=["epilogues", "no epilogues", "no library"])
def blas(request, driver):  # noqa: F811
    """The library: as it is; refusing epilogues, once it sees them; refusing every product."""
    _core.tuning_clear()  # what was said against a product holds for as long as the product is known
    fake = library("libcublasLt.so.13")
    fake.fake_blas_refuse({"epilogues": 0, "no epilogues": 3, "no library": 1}[request.param])
    fake.takes = request.param == "epilogues"
    yield fake
    fake.fake_blas_refuse(0)
    _core.tuning_clear()


class Counted:
    """Which epilogues the library has computed since: {epilogue: how often}."""

    def __init__(self, blas):
        self.blas, self.before = blas, [blas.fake_blas_finished(e) for e in EVERY]

    def since(self):
        now = [self.blas.fake_blas_finished(e) for e in EVERY]
        return {e: n - b for e, n, b in zip(EVERY, now, self.before, strict=True) if n != b}


TANH = {"approximate": "tanh"}


def layers(first, bias, second):
    """(rows, function) of gelu(x w + c) v: ``first``, ``second``: weights are transposed; ``bias``: there is c."""
    rows, last = [], "b"
    if first:
        rows.append(("Transpose", "b", {"perm": [1, 0]}))
        last = "t0"
    rows.append(("MatMul", f"a {last}", {}))
    if bias:
        rows.append(("Add", f"t{len(rows) - 1} d", {}))
    rows.append(("Gelu", f"t{len(rows) - 1}", TANH))
    hidden = f"t{len(rows) - 1}"
    last = "c"
    if second:
        rows.append(("Transpose", "c", {"perm": [1, 0]}))
        last = f"t{len(rows) - 1}"
    rows.append(("MatMul", f"{hidden} {last}", {}))

    def expected(a, b, c, *d):
        x = a @ (b.mT if first else b)
        return gelu(x + d[0] if bias else x, approximate="tanh") @ (c.mT if second else c)

    return rows, expected


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("rows", [(5,), (2, 3), (1, 1)])
def test_layers(blas, kind, bias, transposed, rows):
    torch.manual_seed(0)
    shapes = [(*rows, 6), (16, 6) if transposed[0] else (6, 16), (4, 16) if transposed[1] else (16, 4), (16,)]
    operands = [torch.randn(s).to(kind) for s in shapes[: 3 + bias]]
    counted = Counted(blas)
    compare(*_model(transposed, bias, operands))
    totals = bias and torch.Size(rows).numel() > 1  # one row is its own total
    expected = {GELU_EXTRA_BIAS if bias else GELU_EXTRA: 1, SLOPE_TOTALS if totals else SLOPE: 1}
    assert counted.since() == (expected if blas.takes else {})


def _model(transposed, bias, operands):
    rows, expected = layers(transposed[0], bias, transposed[1])
    return rows, operands, expected


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
def test_without_gradients(blas, kind):
    """Nothing is kept for backward: GELU alone."""
    torch.manual_seed(0)
    operands = [torch.randn(s).to(kind) for s in [(5, 6), (6, 16), (16, 4), (16,)]]
    for bias in (False, True):
        rows, expected = layers(False, bias, False)
        counted = Counted(blas)
        compare(rows, operands[: 3 + bias], expected, dy=False)
        assert counted.since() == ({GELU_BIAS if bias else GELU: 1} if blas.takes else {})


@pytest.mark.parametrize("kind", [*FLOATS, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("rows", [(7,), (3, 67)])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weight_and_bias(blas, kind, rows, transposed):
    """Of any width, and of each way a weight lies in memory."""
    torch.manual_seed(0)
    model = [("MatMul", "a b", {}), ("Add", "t0 c", {})]
    if transposed:
        model = [("Transpose", "b", {"perm": [1, 0]}), ("MatMul", "a t0", {}), ("Add", "t1 c", {})]
    operands = [torch.randn(s).to(kind) for s in [(*rows, 5), (9, 5) if transposed else (5, 9), (9,)]]
    counted = Counted(blas)
    compare(model, operands, lambda a, b, c: a @ (b.mT if transposed else b) + c)
    which = LEFT_TOTALS if transposed else RIGHT_TOTALS
    assert counted.since() == ({which: 1} if blas.takes and kind != torch.float64 else {})


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_no_rows(blas, rows):
    rows_, expected = layers(True, True, True)
    operands = [torch.randn(s) for s in [(*rows, 6), (16, 6), (4, 16), (16,)]]
    compare(rows_, operands, expected)
    compare([("MatMul", "a b", {}), ("Add", "t0 c", {})], [*operands[:1], torch.randn(6, 3), torch.randn(3)], torch_sum)


def torch_sum(a, b, c):
    return a @ b + c


def test_what_the_library_has_no_epilogue_for(driver):  # noqa: F811
    """The exact GELU, float64, lines that are no multiple of 8 long, many weights: PyTorch's numbers all the same."""
    blas = library("libcublasLt.so.13")
    torch.manual_seed(0)
    exact = [("MatMul", "a b", {}), ("Gelu", "t0", {}), ("MatMul", "t1 c", {})]
    counted = Counted(blas)
    compare(exact, [torch.randn(5, 6), torch.randn(6, 16), torch.randn(16, 4)], lambda a, b, c: gelu(a @ b) @ c)
    rows, expected = layers(False, True, False)
    compare(rows, [torch.randn(s).double() for s in [(5, 6), (6, 16), (16, 4), (16,)]], expected)
    compare(rows, [torch.randn(s) for s in [(5, 6), (6, 12), (12, 4), (12,)]], expected)
    assert counted.since() == {RIGHT_TOTALS: 1}  # of the bias: any width will do
    counted = Counted(blas)
    rows, expected = layers(False, False, False)
    compare(rows, [torch.randn(s) for s in [(3, 5, 6), (3, 6, 16), (3, 16, 4)]], expected)
    assert counted.since() == {}


def test_a_chain_takes_gelu_where_it_goes_on(driver):  # noqa: F811
    """What is computed from GELU's result, element by element, is one kernel with it."""
    blas = library("libcublasLt.so.13")
    model = [("MatMul", "a b", {}), ("Gelu", "t0", TANH), ("Mul", "t1 c", {})]
    operands = [torch.randn(5, 6), torch.randn(6, 16), torch.randn(5, 16)]
    counted = Counted(blas)
    compare(model, operands, lambda a, b, c: gelu(a @ b, approximate="tanh") * c)
    assert counted.since() == {}


def test_a_sum_that_is_seen_is_left(blas):
    """What GELU reads is a result of the model, too."""
    torch.manual_seed(0)
    model = [("MatMul", "a b", {}), ("Gelu", "t0", TANH), ("ReduceSum", "t1", {}), ("ReduceSum", "t0", {})]
    model.append(("Add", "t2 t3", {}))
    compare(model, [torch.randn(5, 6), torch.randn(6, 16)], lambda a, b: torch_both(a @ b))


def torch_both(x):
    return (gelu(x, approximate="tanh").sum() + x.sum()).view(1, 1)


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
def test_heuristic_without_an_answer(driver, kind):  # noqa: F811
    """Sizes that no other test has: the library has been asked about those."""
    blas = library("libcublasLt.so.13")
    rows, expected = layers(True, True, False)
    blas.fake_blas_refuse(2)
    try:
        compare(rows, [torch.randn(s).to(kind) for s in [(11, 37), (40, 37), (40, 41), (40,)]], expected)
    finally:
        blas.fake_blas_refuse(0)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
def test_operands_of_any_alignment(blas, kind, offset):
    torch.manual_seed(0)

    def placed(*shape):
        count = torch.Size(shape).numel()
        return torch.randn(count + offset).to(kind)[offset:].view(shape)

    rows, expected = layers(True, True, True)
    compare(rows, [placed(5, 6), placed(16, 6), placed(4, 16), placed(16)], expected)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_module(blas, autocast):
    """Two layers as modules have them; under autocast the gradients of weight and bias are float32 sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(approximate="tanh"), nn.Linear(24, 10))
    x = torch.randn(3, 7, 12)
    exact = nn.Sequential(*[type(m)(**k) for m, k in _kinds(model)]).double()
    exact.load_state_dict({n: p.double() for n, p in model.state_dict().items()})
    exact(x.double()).square().sum().backward()
    plain = {n: p.grad for n, p in exact.named_parameters()}
    counted = Counted(blas)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = ORTModule(model)(x)
    y.float().square().sum().backward()
    allowed = {None: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[autocast]
    for name, p in model.named_parameters():
        off = (p.grad.double() - plain[name]).abs().max() / plain[name].abs().max()
        assert p.grad.dtype == torch.float32 and off <= allowed, name
    found = counted.since()
    assert {GELU_EXTRA_BIAS, SLOPE_TOTALS, LEFT_TOTALS} <= found.keys() if blas.takes else found == {}


def _kinds(model):
    for m in model:
        if isinstance(m, nn.Linear):
            yield m, {"in_features": m.in_features, "out_features": m.out_features}
        else:
            yield m, {"approximate": "tanh"}


def test_every_call_may_fail(driver):  # noqa: F811
    """While products with epilogues are described and started; sizes that are new each time."""
    rows, expected = layers(True, True, True)
    calls, held = FailingCalls(driver), driver.fake_held()
    for attempt in calls:
        operands = [torch.randn(s) for s in [(3, attempt.n), (8, attempt.n), (4, 8), (8,)]]
        s = session(rows, operands)
        with attempt:
            run = s.run(operands, [True] * 4, [True])
            run.backward([torch.ones(3, 4)])
        if not attempt.reached:
            break
        assert attempt.error
        assert (driver.fake_held() - held) % 4 == 0, "a product is held whole or not at all"
        held = driver.fake_held()
        torch.testing.assert_close(s.run(operands, [False] * 4).outputs[0], expected(*operands))
        held = driver.fake_held()
    assert calls.failures > 30


class Fixed:
    """Steps of a model of rows over operands, whose memory is always the same, so that they become graphs."""

    def __init__(self, rows, operands):
        specs = [("float32", tuple(t.shape)) for t in operands]
        self.plan = session(rows, operands).plan(specs, [True] * len(operands), [True], gpu=torch.device("cpu"))
        self.operands, self.y = operands, torch.empty(self.plan.outputs[0][1])
        self.arena, self.dy = aligned(self.plan.arena_bytes), torch.randn(self.y.shape)
        self.grads = [torch.empty_like(t) for t in operands]

    def step(self, graphs=True):
        """(y, gradients), copied."""
        how = (7, None, 0, False, graphs)
        for t in (self.y, *self.grads):
            t.fill_(float("nan"))
        self.plan.forward(self.arena, self.operands, [self.y], [], *how)
        self.plan.backward(self.arena, self.operands, [self.y], [self.dy], self.grads, *how)
        return [t.clone() for t in (self.y, *self.grads)]


def test_step_as_a_graph_has_the_same_bits(driver):  # noqa: F811
    """The pointers of an epilogue are those of the step that is recorded, also when products of others ran since."""
    rows, expected = layers(True, True, True)
    fixed, other = (Fixed(rows, [torch.randn(s) for s in [(5, 6), (16, 6), (4, 16), (16,)]]) for _ in range(2))
    first = fixed.step(graphs=False)
    torch.testing.assert_close(first[0], expected(*fixed.operands))
    for _ in range(4):
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(fixed.step(), first, strict=True))
    assert fixed.plan.graphs[2] >= 3  # backward; forward is too short for one
