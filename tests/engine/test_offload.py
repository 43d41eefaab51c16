"""Activations wait for backward in a file: the same bits, in less memory, and nothing of it is left."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, memory
from tests.engine.test_recomputation import IDS, MODELS, Layers, held_by, plan_of, same_bits, steps
from tests.selection import each
from tests.twins import Doubled

OFFLOADED = "(deleted)"


def files():
    """Descriptors of files without a name that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if path.endswith(OFFLOADED) and "/memfd:" not in path:
            found.append(int(fd))
    return found


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


# --- values -----------------------------------------------------------------------------------------------------------


@each("name, autocast", [(n, a) for n in MODELS for a in (False, True)], [("layers", False), ("layers", True)])
@pytest.mark.parametrize("level", [0, 2])
def test_the_same_bits(name, autocast, level, folder):
    stored, plan = steps(MODELS[name], autocast)
    moved, smaller = steps(
        MODELS[name], autocast, memory_offload=True, memory_offload_path=folder, memory_opt_level=level
    )
    assert same_bits(stored, moved)
    assert (plan.offloaded, plan.offload_bytes) == (0, 0)
    assert smaller.arena_bytes < plan.arena_bytes
    if level == 0:
        assert smaller.recomputed[0] == 0 and smaller.recomputed[1] > 0
        assert smaller.offloaded and smaller.offload_bytes >= plan.arena_bytes - smaller.arena_bytes
    assert os.listdir(folder) == []  # the file has no name


@pytest.mark.full
def test_each_budget_is_kept_and_takes_no_more_work_than_a_smaller_one():
    stored, plan = steps(Layers)
    held, work = held_by(Layers()), []
    for share in (2, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        moved, smaller = steps(Layers, memory_budget=held + int(share * plan.arena_bytes), memory_offload=True)
        assert same_bits(stored, moved)
        assert smaller.arena_bytes <= share * plan.arena_bytes
        work.append(smaller.recomputed[1])
    assert work[0] == 0 and work == sorted(work) and work[-1] > 0


class NotAgain(nn.Module):
    """What the function makes must not run twice: a budget offloads it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.second:
            x = layer(Doubled.apply(x))
        return x.square().sum()


def test_a_budget_reaches_less_where_values_cannot_be_computed_again():
    x = torch.randn(512, 64)
    model = ORTModule(NotAgain())
    stored, twice = memory.predict(model, x), None
    level = ORTModule(NotAgain(), config=Config(memory_opt_level=2))
    moved = ORTModule(NotAgain(), config=Config(memory_opt_level=2, memory_offload=True))
    twice, both = memory.predict(level, x), memory.predict(moved, x)
    assert both.total < twice.total <= stored.total
    assert both.offloaded > 0 == twice.offloaded and "offloaded" in str(both) and "offloaded" not in str(twice)


# --- lives ------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))]
        )

    def forward(self, x):
        return self.layers(x).square().sum()


ROWS = torch.arange(24.0 * 32).reshape(24, 32).sin()


def offloading(make=Small, **config):
    torch.manual_seed(0)
    return ORTModule(make(), config=Config(memory_offload=True, **config))


def gradients(model, run):
    model.zero_grad()
    torch.manual_seed(3)
    run(model)
    return [p.grad.clone() for p in model.parameters()]


def two_forwards_first(model):
    losses = [model(ROWS), model(ROWS.flip(1))]
    for loss in losses:
        loss.backward()


def backward_twice(model):
    loss = model(ROWS)
    loss.backward(retain_graph=True)
    loss.backward()


def other_forward_between(model):
    loss = model(ROWS)
    model(ROWS.flip(0))  # whose backward never comes
    loss.backward()


def after_inference(model):
    with torch.no_grad():
        model(ROWS)
    model(ROWS).backward()


RUNS = [two_forwards_first, backward_twice, other_forward_between, after_inference]


@pytest.mark.parametrize("segments", ["0", "1"])
def test_each_forward_has_its_own_room(segments):
    torch.manual_seed(0)
    gc.collect()
    before = files()
    stored = ORTModule(Small(), config=Config(enable_mem_efficient_grad_mgmt=segments))
    moved = offloading(enable_mem_efficient_grad_mgmt=segments)
    for run in 2 * RUNS:
        assert same_bits(gradients(stored, run), gradients(moved, run)), run
        gc.collect()
        assert len(files()) == len(before) + 1  # for the next step
    assert plan_of(moved).offloaded
    loss = moved(ROWS)
    assert len(files()) == len(before) + 1
    del loss, moved
    gc.collect()
    assert files() == before


def test_a_forked_process_has_rooms_of_its_own():
    model = offloading()
    model(ROWS).backward()
    plan, used = plan_of(model), set(files())
    taken = plan.take_room()  # that of the first step
    assert set(files()) == used
    plan.give_room(taken)
    child = os.fork()
    if child == 0:
        try:
            fresh, there = plan.take_room(), set(files())
            with pytest.raises(RuntimeError, match="offloaded by another process"):
                plan.give_room(taken)
            os._exit(0 if fresh is not taken and len(there) == len(used) + 1 else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="MEMORY_OFFLOAD_PATH.*is a folder"):
        Config(memory_offload_path=str(tmp_path / "none"))
    gone = tmp_path / "gone"
    gone.mkdir()
    model = offloading(memory_offload_path=str(gone))
    gone.rmdir()
    with pytest.raises(OSError, match="cannot be offloaded to a file in .*gone"):
        model(ROWS)
    gone.mkdir()
    model(ROWS).backward()


FULL = """
import resource, sys, torch
from ortmodule import Config, ORTModule
from tests.engine.test_offload import ROWS, Small
torch.manual_seed(0)
model = ORTModule(Small(), config=Config(memory_offload=True, memory_offload_path=sys.argv[1]))
before = [p.clone() for p in model.parameters()]
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        model(ROWS)
    except MemoryError as error:
        print(error)
    else:
        sys.exit("no error")
assert all(torch.equal(p, q) for p, q in zip(before, model.parameters())) and model.layers[0].weight.grad is None
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
model(ROWS).backward()
assert model.layers[0].weight.grad is not None
"""


def test_a_full_disk_is_said_before_the_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be offloaded to a file of") == 2


def test_a_file_that_cannot_be_read_any_more():
    """PyTorch computes the gradients."""
    gc.collect()
    torch.manual_seed(0)
    eager, before = Small().eval(), set(files())
    eager(ROWS).backward()
    model = offloading().eval()
    loss = model(ROWS)
    assert plan_of(model).offloaded
    for fd in set(files()) - before:
        os.ftruncate(fd, 0)
    with pytest.warns(UserWarning, match="cannot be read"):
        loss.backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_level_1_says_that_nothing_is_offloaded():
    with pytest.warns(UserWarning, match="MEMORY_OFFLOAD has no effect at MEMORY_OPT_LEVEL=1"):
        model = offloading(memory_opt_level=1)
        model(ROWS).backward()
    assert plan_of(model).offloaded == 0


# --- what is said -----------------------------------------------------------------------------------------------------


def test_prices_count_what_is_moved():
    model = offloading(Layers)
    prices = memory.pareto(model, (IDS,))
    assert prices[0].offloaded == 0 and prices[0].extra_work == 0
    assert [p.peak for p in prices] == sorted((p.peak for p in prices), reverse=True)
    plain = memory.pareto(ORTModule(Layers()), (IDS,))
    assert prices[-1].peak <= plain[-1].peak and all(p.offloaded == 0 for p in plain)
