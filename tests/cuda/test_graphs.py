"""CUDA graphs (replay.c) on the emulated GPU: a step that is started as a whole is that of its kernels."""

import copy
import gc

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import Multiplied, driver, gpt2, library  # noqa: F401  (a fixture)
from tests.cuda.test_emulated import session as session_of

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

ROWS = [
    ("MatMul", "x w", "t", {}),
    ("Constant", "", "ratio", {"value_float": 0.3}),
    ("Constant", "", "one", {"value_float": 1.0}),
    ("Cast", "one", "mode", {"to": 9}),
    ("Tanh", "t", "u", {}),
    ("Dropout", "u ratio mode", "v", {}),
    ("Softmax", "v", "p", {"axis": -1}),
    ("Mul", "p v", "y", {}),
]
INPUTS = {"x": ("float32", 2), "w": ("float32", 2)}


def aligned(count):
    memory = torch.zeros(count + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + count]


class Step:
    """A plan of ``rows`` and memory for its runs: by default always the same."""

    def __init__(self, needs=(True, True), shape=(9, 17, 5), rows=ROWS):
        self.rows, self.inner, self.columns = shape
        specs = [("float32", (self.rows, self.inner)), ("float32", (self.inner, self.columns))]
        self.session = session_of(rows, INPUTS, ("y", "float32", 2))
        self.plan = self.session.plan(specs, needs, [True], gpu=torch.device("cpu"))
        torch.manual_seed(0)
        self.x, self.w = torch.randn(specs[0][1]), torch.randn(specs[1][1])
        self.arena, self.y = aligned(self.plan.arena_bytes), torch.empty(self.rows, self.columns)
        self.dy = torch.randn(self.rows, self.columns)
        self.grads = [torch.empty(s[1]) if s else None for s in self.plan.input_grads]

    def run(self, seed, graphs=True):
        """(y, gradients), copied."""
        how = (None, 0, False, graphs)
        self.y.fill_(float("nan"))
        for grad in self.grads:
            grad is None or grad.fill_(float("nan"))
        self.plan.forward(self.arena, [self.x, self.w], [self.y], [], seed, *how)
        self.plan.backward(self.arena, [self.x, self.w], [self.y], [self.dy], self.grads, seed, *how)
        return [self.y.clone(), *(grad.clone() for grad in self.grads if grad is not None)]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_second_time_records_then_replays(driver):  # noqa: F811
    step = Step()
    found = [step.run(7), step.run(7), step.run(7)]
    assert step.plan.graphs == (2, 0, 4)  # forward and backward
    assert same(found[0], found[1]) and same(found[1], found[2])
    driver.fake_fail_at(0)
    step.run(7)
    replayed = driver.fake_calls()
    driver.fake_fail_at(0)
    step.run(7, graphs=False)
    assert replayed < driver.fake_calls()


def test_seed_and_contents_are_those_of_the_step(driver):  # noqa: F811
    """A recording draws with the seed of its step, and reads what lies at the addresses now."""
    step = Step()
    for seed in (1, 2, 3, 1 << 40, (1 << 64) - 1):
        step.x.normal_()
        step.dy.normal_()
        assert same(step.run(seed), step.run(seed, graphs=False))
    assert step.plan.graphs[2] >= 6
    assert not same(step.run(1), step.run(2))


def test_other_memory_is_another_recording(driver):  # noqa: F811
    """Results in other memory are not those of the recording; recordings are kept, then updated."""
    step = Step()
    places = [(aligned(step.plan.arena_bytes), torch.empty_like(step.y), step.dy.clone()) for _ in range(6)]
    for round_ in range(3):
        for i, (step.arena, step.y, step.dy) in enumerate(places[:4]):
            assert same(step.run(round_ * 9 + i), step.run(round_ * 9 + i, graphs=False))
    assert step.plan.graphs == (8, 0, 16)
    for round_ in range(3):
        for step.arena, step.y, step.dy in places[4:]:
            assert same(step.run(round_), step.run(round_, graphs=False))
    recorded, updated, started = step.plan.graphs
    assert recorded == 12 and updated == 4 and started > 20


def test_small_inputs_may_move(driver):  # noqa: F811
    """An input without a gradient comes to a fixed place: its address does not matter once it has moved."""
    step = Step(needs=(False, True))
    kept = []
    for seed in range(8):
        step.x = torch.randn(9, 17)
        kept.append(step.x)
        assert same(step.run(seed), step.run(seed, graphs=False))
    recorded, _, started = step.plan.graphs
    assert recorded == 2 and started >= 10


def test_addresses_that_never_come_back_are_run_one_by_one(driver):  # noqa: F811
    step = Step()
    kept = []
    for seed in range(5):
        step.y = torch.empty_like(step.y)
        kept.append(step.y)
        assert same(step.run(seed), step.run(seed, graphs=False))
    assert step.plan.graphs[0] <= 1  # backward may not write where y is


def test_every_call_may_fail(driver):  # noqa: F811
    """In a step that records and one that replays: what fails before the start is run kernel by kernel, what fails then
    is an error; the next step is right; all is given back."""
    Step().run(1)
    first = Step()
    first.run(1), first.run(1)
    del first  # the stream for recording stays
    held = driver.fake_held()
    for seen in (1, 2):
        for attempt in FailingCalls(driver):
            step = Step()
            expected = step.run(5, graphs=False)
            for _ in range(seen):
                step.run(5)
            with attempt:
                assert same(step.run(5), expected)
            assert same(step.run(5), expected)
            del step
            assert driver.fake_held() == held
        assert attempt.n > 8


def test_threads_share_a_plan(driver):  # noqa: F811
    from concurrent.futures import ThreadPoolExecutor

    step = Step()
    expected = {seed: step.run(seed, graphs=False) for seed in range(4)}

    def work(seed):
        mine = copy.copy(step)
        mine.arena, mine.y, mine.dy = aligned(step.plan.arena_bytes), step.y.clone(), step.dy.clone()
        mine.grads = [torch.empty_like(grad) for grad in step.grads]
        return all(same(mine.run(seed), expected[seed]) for _ in range(4))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_two_devices(driver):  # noqa: F811
    """A plan's work is started on its own device; one that there is not is named."""
    s = session_of(ROWS, INPUTS, ("y", "float32", 2))
    specs = [("float32", (9, 17)), ("float32", (17, 5))]
    there = s.model.plan(specs, [True, True], [True], 0, (), None, False, 1)
    step = Step()
    step.plan = there
    there.keep(aligned(max(there.constant_bytes, 1)))
    before = driver.fake_launches(0), driver.fake_launches(1)
    for _ in range(3):
        step.run(3)
    assert driver.fake_launches(0) == before[0] and driver.fake_launches(1) > before[1]
    assert there.graphs[2] == 4
    with pytest.raises(_core.Error, match="there is no cuda:5: the driver knows 2 devices"):
        s.model.plan(specs, [True, True], [True], 0, (), None, False, 5)


class Cached:
    """Memory that no tensor holds any more is handed out again, as a GPU's allocator does."""

    def __init__(self):
        self.kept = {}

    def empty(self, spec, device=None):
        kept = self.kept.setdefault(spec, [])
        for memory, alone in kept:
            if torch._C._storage_Use_Count(memory.untyped_storage()._cdata) == alone:
                return memory.detach()
        memory = torch.empty(spec[1], dtype=getattr(torch, spec[0]))
        if spec[0] == "uint8":
            memory = aligned(memory.numel())
        kept.append((memory, torch._C._storage_Use_Count(memory.untyped_storage()._cdata)))
        return memory.detach()


class Around(nn.Module):
    """Layers on both sides of an operator that PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), Multiplied(), nn.Linear(5, 3)
        self.fit = nn.Linear(8, 4)

    def forward(self, x):
        x = self.fit(torch.tanh(self.first(x)).softmax(-1))
        return self.last(torch.sigmoid(self.middle(x)) * 2).softmax(-1)


@pytest.mark.filterwarnings("ignore")
def test_nodes_of_pytorch_end_a_recording(driver, monkeypatch):  # noqa: F811
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    torch.manual_seed(0)
    model = Around()
    expected, wrapped = copy.deepcopy(model), ORTModule(model)
    x = torch.randn(7, 6)
    started = driver.fake_graphs()
    for _ in range(6):
        for each in (wrapped, expected):
            each.zero_grad()
            each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert driver.fake_graphs() > started


@pytest.mark.parametrize("on", ["1", "0"])
def test_training_with_dropout(driver, monkeypatch, on):  # noqa: F811
    """Steps with the setting on and off have the same bits: masks, losses and weights."""
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)

    def losses(on):
        monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", on)
        model = ORTModule(gpt2())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        tokens = torch.randint(0, 61, (2, 9))
        found = []
        for _ in range(5):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    started = driver.fake_graphs()
    found = losses(on)
    assert (driver.fake_graphs() > started) == (on == "1")
    assert found == losses("0")


def test_segments_have_their_own_graphs(driver, monkeypatch):  # noqa: F811
    """Gradients that are handed over while backward goes on, to hooks that make an optimizer's step of each: the same
    bits as in one piece, kernel by kernel or as a graph a segment."""
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    monkeypatch.setattr("ortmodule.engine.memory_goal.SEGMENT_BYTES", 4000)

    def steps(graphs, hand_over):
        monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", graphs)
        monkeypatch.setenv("ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT", hand_over)
        model, order = ORTModule(gpt2()), []

        def update(parameter):
            order.append(driver.fake_launches(0) + driver.fake_graphs())
            with torch.no_grad():
                parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        torch.manual_seed(1)
        tokens = torch.randint(0, 61, (2, 9))
        found, before = [], driver.fake_graphs()
        for _ in range(6):
            order.clear()
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            found.append(loss.item())
        return found, len(set(order)), driver.fake_graphs() - before

    whole, pieces, started = steps("1", "0")
    assert pieces == 1 and started > 0
    for graphs, least in (("1", 2 * started), ("0", 0)):
        found, pieces, started = steps(graphs, "auto")
        assert found == whole and pieces > 2
        assert started > least if graphs == "1" else started == 0


def test_the_graphs_of_all_plans_are_bounded(driver):  # noqa: F811
    """Those that were of no use for longest are given back; plans that come again record theirs anew."""
    most, steps, held = 512, [], []
    gc.collect()
    for i in range(most // 2 + 20):
        steps.append(Step(shape=(3 + i % 7, 5, 4)))
        for _ in range(2):
            steps[-1].run(1)
        if i % 16 == 0:
            steps[0].run(1)  # which stays
        held.append(driver.fake_held())
        graphs, kernels = _core.cuda_graphs()
        assert graphs <= most and kernels >= 4 * graphs
    assert graphs == most and max(held) - held[most // 2] <= 2, "the driver holds no more of them"
    assert steps[0].plan.graphs[0] == 2, "it was of use, and has never gone"
    assert same(steps[1].run(1), steps[1].run(1, graphs=False))
    assert steps[1].plan.graphs[0] == 4, "it had gone"
    assert _core.cuda_graphs()[0] == most
    steps.clear()
    gc.collect()
    assert _core.cuda_graphs()[0] < 20


@pytest.mark.full
def test_the_kernels_of_all_graphs_are_bounded(driver):  # noqa: F811
    """Long graphs are given back before there are as many of them as there may be short ones."""
    most, length, steps, seen = 1 << 17, 1000, [], []
    names = ["x", *(f"t{i}" for i in range(length))]
    rows = [("Softmax", a, b, {"axis": -1}) for a, b in zip(names[:-1], names[1:], strict=True)]
    rows.append(("MatMul", f"{names[-1]} w", "y", {}))
    gc.collect()
    for _ in range(most // (2 * length) + 4):
        steps.append(Step(shape=(1, 2, 1), rows=rows))
        for _ in range(2):
            steps[-1].run(1)
        seen.append(_core.cuda_graphs())
    assert max(kernels for _, kernels in seen) <= most < sum(each.plan.graphs[0] for each in steps) * length
    assert seen[-1][0] < 2 * len(steps) < 512 and seen[-1][1] > most - 3 * length
    assert same(steps[0].run(1), steps[0].run(1, graphs=False))
    steps.clear()
    gc.collect()
    assert _core.cuda_graphs()[0] < 20


def test_threads_take_each_others_graphs(driver):  # noqa: F811
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        step = Step(shape=(3, 5, 4))
        expected = step.run(i, graphs=False)
        found = [same(step.run(i), expected) for _ in range(3)]
        return step if all(found) else None

    with ThreadPoolExecutor(4) as pool:
        steps = list(pool.map(work, range(280)))
    assert all(step is not None for step in steps) and _core.cuda_graphs()[0] <= 512
