"""Red zones (ORTMODULE_RED_ZONES): a kernel that leaves its block is named, and where no block lives all is NaN."""

import copy
import ctypes
import re

import pytest
import torch

from ortmodule import ORTModule, _core, explain
from tests.cuda.test_emulated import DRY, driver, gpt2, session  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def default_stream(monkeypatch):
    """PyTorch's build here may have no CUDA to ask for the current stream."""
    monkeypatch.setattr("ortmodule.engine.session.stream_of", lambda gpu: 0)


@pytest.fixture
def zones(monkeypatch, driver):  # noqa: F811
    monkeypatch.setenv("ORTMODULE_RED_ZONES", "1")
    yield driver
    driver.fake_write_after(0, None)


def made():
    """A plan of three kernels forward, whose results but the last one live in the arena."""
    rows = [("Softmax", "x", "a", {}), ("LogSoftmax", "a", "b", {}), ("Softmax", "b", "y", {})]
    return session(rows, {"x": ("float32", 2)}, ("y", "float32", 2)).plan(
        [("float32", (5, 33))], [True], [True], gpu=GPU
    )


class Step:
    """Forward and backward of a plan over an arena whose place is known before."""

    def __init__(self, plan):
        self.plan, self.x, self.y = plan, torch.randn(5, 33), torch.empty(5, 33)
        room = torch.zeros(plan.arena_bytes + 256, dtype=torch.uint8)
        start = -room.data_ptr() % 256
        self.arena = room[start : start + plan.arena_bytes]

    def forward(self):
        self.plan.forward(self.arena, [self.x], [self.y], [], 0, None, 0)

    def backward(self, dy):
        dx = torch.empty(5, 33)
        self.plan.backward(self.arena, [self.x], [self.y], [dy], [dx], 0, None, 0)
        return dx


def spans(arena):
    """[start, end) of what is not 0xFF; elements may have such bytes, so what lies less than a zone apart is one."""
    found = []
    for at in (arena != 0xFF).nonzero().flatten().tolist():
        if found and at < found[-1][1] + 512:
            found[-1][1] = at + 1
        else:
            found.append([at, at + 1])
    return found


def test_without_them_nothing_is_looked_at(driver):  # noqa: F811
    plain = Step(made())
    driver.fake_write_after(1, ctypes.c_void_p(plain.arena.data_ptr() + plain.plan.arena_bytes - 1))
    plain.forward()
    driver.fake_write_after(0, None)


def test_a_run_is_right_and_leaves_nothing_behind(zones):
    """Between forward and backward only what backward needs is there, and behind it a zone; after it nothing is."""
    step = Step(made())
    step.forward()
    x = step.x.clone().requires_grad_()
    y = x.softmax(-1).log_softmax(-1).softmax(-1)
    torch.testing.assert_close(step.y, y.detach())
    living = spans(step.arena)
    end = living[0][1]
    assert step.arena[end : end + 1024].view(torch.float32).isnan().all()
    assert living and sum(end - start for start, end in living) <= step.arena.numel() - 1024 * len(living)
    dy = torch.randn(5, 33)
    torch.testing.assert_close(step.backward(dy), torch.autograd.grad(y, x, dy)[0])
    assert not spans(step.arena)


def broken(step, launch, offset):
    """The error of a forward whose kernel number ``launch`` writes a byte at this offset of the arena."""
    step.arena.fill_(0)
    step.driver.fake_write_after(launch, ctypes.c_void_p(step.arena.data_ptr() + offset))
    with pytest.raises(_core.Error) as error:
        step.forward()
    return str(error.value)


def test_a_write_beside_a_block_is_named(zones):
    """At the first byte behind it, within its rounding, and at the end of the arena; the writer is named."""
    step = Step(made())
    step.driver = zones
    step.forward()
    start, end = spans(step.arena)[0]
    for offset in (end, end + 1, step.plan.arena_bytes - 1):
        for launch, name in ((1, "Softmax"), (2, "LogSoftmax"), (3, "Softmax")):
            text = broken(step, launch, offset)
            found = re.search(r"(\w+) \(.*\) wrote (\d+) bytes behind a block of (\d+) bytes of (\w+) \(", text)
            assert found, text
            assert found[1] == name, text
            if launch > 1 and offset < end + 2:
                assert int(found[2]) == offset - end and int(found[3]) == end - start == 4 * 5 * 33, text
    zones.fake_write_after(0, None)
    step.forward()  # and it goes on


def test_a_model_under_them(zones):
    """GPT-2, forward and backward: PyTorch's results, nothing is found, and no CUDA graph hides a step."""
    model = gpt2(**DRY)
    expected, wrapped = copy.deepcopy(model), ORTModule(model)
    tokens = torch.randint(0, 61, (2, 11))
    for _ in range(3):
        losses = []
        for each in (wrapped, expected):
            each.zero_grad()
            loss = each(tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)
    for p, q in zip(wrapped.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    assert explain(wrapped).captured
    graphs = [graph for variants in wrapped._ortmodule.graphs.values() for graph in variants]
    plans = [plan for graph in graphs for plan in graph.session.plans.values()]
    assert plans and all(plan.graphs == (0, 0, 0) for plan in plans)
