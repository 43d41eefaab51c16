"""What a step takes is known before there is one, to the byte."""

import gc
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from ortmodule import Config, ORTModule, UnsupportedError, _core, explain, memory
from ortmodule.__main__ import main
from ortmodule.engine.memory_goal import ALL_AGAIN, MemoryGoal
from tests.engine.test_recomputation import IDS, MODELS, same_bits
from tests.selection import each

MB = 1 << 20


class Small(nn.Module):
    """A mask and dropout to keep, a norm, and results that are no loss."""

    def __init__(self, width=48):
        super().__init__()
        self.words, self.norm, self.drop = nn.Embedding(50, width), nn.LayerNorm(width), nn.Dropout(0.2)
        self.wide, self.head, self.unused = nn.Linear(width, 4 * width), nn.Linear(4 * width, 50), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, ids):
        return self.head(self.drop(torch.relu(self.wide(self.norm(self.words(ids)) * self.scale))))


ARCHITECTURES = {"small": Small, **MODELS}


@pytest.fixture
def arenas(monkeypatch):
    """Bytes of all arenas that runs take from now on."""
    taken, empty = [], _core.empty

    def noted(kind, dtype, sizes):
        if dtype == "uint8":
            taken.append(sizes[0])
        return empty(kind, dtype, sizes)

    monkeypatch.setattr(_core, "empty", noted)
    return taken


WAYS = ["float32", "bfloat16", "autocast"]


@each("name, way", [(n, w) for n in ARCHITECTURES for w in WAYS], [("small", w) for w in WAYS])
def test_predicted_is_what_the_run_takes(name, way, arenas):
    torch.manual_seed(0)
    model = ORTModule(ARCHITECTURES[name]())
    if way == "bfloat16":
        model.to(torch.bfloat16)
    before = [t.clone() for t in model.state_dict().values()]
    drawn = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        if name == "convolutions" and way == "bfloat16":
            pytest.skip("ids.float() meets weights in bfloat16")
        peak = memory.predict(model, IDS)
        assert torch.equal(drawn, torch.get_rng_state()) and same_bits(before, model.state_dict().values())
        assert all(p.grad is None for p in model.parameters())
        arenas.clear()
        result = model(IDS)
    result.sum().backward()
    assert explain(model).captured and model._ortmodule.compiler.exports == 1
    (plan,) = (p for p in model._ortmodule.latest.session.plans.values() if not p.prologue)
    assert peak.arena == plan.arena_bytes == arenas[-1]
    rounded = 128 * len(plan.blocks())  # to 64 bytes each, and red zones where there are some
    assert plan.peak()[1] <= plan.arena_bytes <= 1.05 * plan.peak()[1] + rounded
    assert peak.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert peak.parameters == sum(t.nbytes for t in model.state_dict().values())
    assert peak.inputs == IDS.nbytes
    assert peak.total == sum(tensor.bytes for tensor in peak.tensors)


def test_the_engine_takes_as_much_as_was_said():
    """Counted where the engine takes blocks of a megabyte and more: between forward and backward it is an arena."""
    torch.manual_seed(0)
    model = ORTModule(Small(256))
    ids = torch.randint(50, (64, 64))
    peak = memory.predict(model, ids)
    model(ids).sum().backward()
    model.zero_grad()
    gc.collect()
    before = _core.memory()["used"]
    result = model(ids)
    taken = _core.memory()["used"] - before
    assert result.nbytes < MB < peak.arena and 0 < taken - peak.arena <= 4096  # a header, and whole pages
    assert not explain(model).fallback


def test_tensors_are_named_by_their_modules():
    peak = memory.predict(Small(), IDS, optimizer="adam")
    assert {(t.kind, t.module, t.name) for t in peak.tensors} >= {
        ("parameter", "wide", "weight"), ("gradient", "wide", "weight"), ("optimizer", "wide", "weight"),
        ("parameter", "", "scale"), ("parameter", "unused", "bias"),
    }  # fmt: skip
    assert not any(t.kind == "gradient" and t.module == "unused" for t in peak.tensors)
    assert any(t.kind == "activation" and t.module == "wide" for t in peak.tensors)
    assert [t.bytes for t in peak.tensors] == sorted((t.bytes for t in peak.tensors), reverse=True)
    text = str(peak)
    assert "wide.weight" in text and "optimizer" in text and f"in {len(peak.tensors) - 10} more" in text


class Boxes(nn.Module):
    """Modules in containers that never run, and in some that do."""

    def __init__(self):
        super().__init__()
        self.named = nn.ModuleDict({"first": nn.Linear(64, 64), "inner": nn.ModuleDict({"in": Box()})})
        self.listed = nn.ModuleDict({"all": nn.ModuleList([Box()])})
        self.run, self.lists = nn.Sequential(nn.Sequential(Box())), nn.ModuleList([nn.ModuleList([Box()])])

    def forward(self, x):
        x = self.named["inner"]["in"](self.named["first"](x).tanh())
        return self.run(self.lists[0][0](self.listed["all"][0](x)))


class Box(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def test_modules_in_containers_have_their_whole_path():
    model = Boxes()
    paths = {t.module for t in memory.predict(model, torch.ones(32, 64)).tensors if t.kind == "activation"} - {""}
    assert paths <= {name for name, _ in model.named_modules()}
    assert {path.split(".")[0] for path in paths} == {"named", "listed", "run", "lists"}


def test_states_of_the_optimizer():
    model = Small()
    model.wide.requires_grad_(False)
    trained = sum(p.nbytes for m in (model.words, model.norm, model.head) for p in m.parameters())
    wrapped = ORTModule(model)

    def states(optimizer):
        return memory.predict(wrapped, IDS, optimizer=optimizer).optimizer

    assert [states(kind) / trained for kind in ("none", "sgd", "momentum", "adam", "amsgrad")] == [0, 0, 1, 2, 3]
    params = list(model.parameters())
    assert states(torch.optim.SGD(params)) == 0 and states(torch.optim.SGD(params, momentum=0.9)) == trained
    adam = torch.optim.AdamW(params)
    assert states(adam) == 2 * trained
    wrapped(IDS).sum().backward()
    adam.step()
    kept = sum(t.nbytes for state in adam.state.values() for t in state.values())
    assert states(adam) == kept
    with pytest.raises(ValueError, match="optimizer='adamm': it is an optimizer, or one of none"):
        states("adamm")


def test_on_the_meta_device():
    """Without the memory: the parameters have four gigabytes."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(1 << 24, 64), nn.Linear(64, 1 << 24)
            self.last.weight, self.tied = self.words.weight, self.words  # one tensor in three places

        def forward(self, ids):
            return torch.tanh(self.tied(ids)).sum() + self.last.bias[:2].sum()

    with torch.device("meta"):
        model, ids = Wide(), torch.empty(8, 24, dtype=torch.int64)
    peak = memory.predict(model, ids)
    assert peak.parameters == sum(p.nbytes for p in model.parameters()) > 4 << 30
    assert peak.gradients == peak.parameters
    assert model.last.weight.is_meta and ids.is_meta


@pytest.mark.full
@pytest.mark.parametrize("name", ["small", "layers"])
def test_the_meta_device_gives_the_same(name):
    with torch.device("meta"):
        model = ARCHITECTURES[name]()
    there, here = memory.predict(model, IDS.to("meta")), memory.predict(ARCHITECTURES[name](), IDS)
    assert str(there) == str(here)


def test_inference_keeps_nothing():
    with torch.no_grad():
        model = ORTModule(Small().eval())
        peak = memory.predict(model, IDS)
    assert peak.gradients == 0 and peak.arena < memory.predict(model, IDS).arena


def test_a_batch_larger_than_this_machine():
    ids = torch.zeros((), dtype=torch.int64).expand(1 << 26, 1 << 10)
    peak = memory.predict(Small(), ids)
    assert peak.activations > 1 << 40


def test_what_pytorch_runs_is_refused():
    class Counting(nn.Module):
        def forward(self, x):
            torch.manual_seed(0)
            return x * 2

    with pytest.raises(UnsupportedError, match="PyTorch would run it"):
        memory.predict(Counting(), torch.ones(4, 4))


def test_settings_of_the_model_hold():
    model = Small()
    stored = memory.predict(ORTModule(model), IDS)
    least = memory.predict(ORTModule(model, config=Config(memory_opt_level=2)), IDS)
    assert least.arena < stored.arena and least.recomputed and least.extra_work > 0
    with pytest.raises(
        MemoryError, match=r"the memory budget leaves \d+; the largest: \w+ \(.*\) with \d+ bytes, .* with"
    ):
        budget = stored.total - stored.arena + 1000
        memory.predict(ORTModule(model, config=Config(memory_budget=budget)), IDS)
    with pytest.raises(MemoryError, match=r"the largest: head.weight with \d+ bytes, wide.weight with"):
        memory.predict(ORTModule(model, config=Config(memory_budget=1000)), IDS)


# --- searches ---------------------------------------------------------------------------------------------------------


def test_the_largest_batch_fits_and_the_next_does_not(arenas):
    model = ORTModule(Small())
    budget = 6 * memory.predict(model, IDS).total
    arenas.clear()  # of the graph's check, on a small sample
    largest = memory.largest_batch(model, (IDS,), budget, optimizer="adam")
    assert not arenas and largest > 12

    def total(size):
        return memory.predict(model, IDS[:1].expand(size, -1), optimizer="adam").total

    assert total(largest) <= budget < total(largest + 1)
    model(IDS[:1].expand(largest, -1)).sum().backward()
    assert model._ortmodule.compiler.exports == 1
    assert arenas[-1] == memory.predict(model, IDS[:1].expand(largest, -1)).arena


def test_other_dimensions_and_arguments_with_names():
    model = ORTModule(Small())
    peak = memory.predict(model, IDS)
    longest = memory.largest_batch(model, {"ids": IDS}, 2 * peak.total, dim=1)
    assert memory.predict(model, torch.zeros(8, longest, dtype=torch.int64)).total <= 2 * peak.total
    assert longest > IDS.shape[1]
    with pytest.raises(ValueError, match="no tensor of the sample has a dimension 2"):
        memory.largest_batch(model, IDS, dim=2)
    with pytest.raises(
        MemoryError, match=r"a batch of 1 does not fit in 100000 bytes: .*; the largest: parameter head"
    ):
        memory.largest_batch(model, IDS, 100000)


def test_sizes_that_what_pytorch_runs_decides():
    """Which rows have labels is counted behind a node of PyTorch's, which no sketch runs."""

    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, x, labels):
            return nn.functional.cross_entropy(self.head(x), Odd.apply(labels))

    model, x, labels = ORTModule(Labelled()), torch.ones(128, 8), torch.arange(128) % 7 - 1
    labels[labels > 4] = -100
    model(x, labels.clamp(min=0)).backward()
    with pytest.raises(UnsupportedError, match="PyTorch runs a part of the graph"):
        memory.predict(model, x, labels.clamp(min=0))


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 0

    @staticmethod
    def backward(ctx, grad):
        return None


def test_what_is_free_is_the_budget_where_none_is_given():
    class Large(nn.Module):
        def forward(self, x):
            return torch.tanh(x.unsqueeze(1).expand(-1, 1 << 22, -1) * self.weight)

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    x = torch.ones(2, 4)
    largest = memory.largest_batch(ORTModule(Large()), x)
    free = _core.memory_limits()["most"]
    assert 0 < largest * (1 << 26) < free


LIMITED = """
import resource
import torch
from torch import nn
from ortmodule import ORTModule, _core, memory

model, x = ORTModule(nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 64))), torch.ones(8, 64)
model(x).sum().backward()
model.zero_grad()
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), resource.RLIM_INFINITY))
room, held = _core.memory_limits()["room"], sum(p.nbytes for p in model.parameters())
largest = memory.largest_batch(model, x)
model(x[:1].expand(largest, -1)).sum().backward()
model.zero_grad()
try:
    model(x[:1].expand(2 * largest, -1))
except MemoryError as error:
    print(room, held, largest, *(memory.predict(model, x[:1].expand(n, -1)).total for n in (largest, largest + 1)))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer wants all addresses")
def test_a_limit_of_addresses_is_what_is_free():
    """In a process with a limit of addresses the largest batch is found without a try, and trains; twice as much is
    refused."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIMITED], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    room, held, largest, takes, more = map(int, done.stdout.split())
    assert room <= 1 << 30 and largest > 1000
    assert takes <= room + held < 1.03 * more


def test_a_budget_of_the_model_makes_room_by_recomputation():
    model = Small(8)
    budget = 3 * memory.predict(model, IDS).total
    stored = memory.largest_batch(ORTModule(model), IDS, budget)
    again = memory.largest_batch(ORTModule(model, config=Config(memory_budget=budget)), IDS)
    assert again > stored


@each("name", list(ARCHITECTURES), ["small"])
def test_less_memory_costs_more_work(name):
    model = ORTModule(ARCHITECTURES[name]())
    prices = memory.pareto(model, IDS)
    assert prices == sorted(prices, key=lambda price: -price.peak) and prices[0].extra_work == 0
    assert [p.extra_work for p in prices] == sorted(p.extra_work for p in prices)
    assert len({p.peak for p in prices}) == len(prices) > 1
    usual = memory.predict(model, IDS)
    assert prices[0].peak >= usual.total and usual.extra_work <= 1 / 32  # what costs next to nothing


# --- the command line -------------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8)), torch.ones(16, 8)

def nothing():
    return None
"""


def test_large_results_do_not_make_a_budget_dear():
    """What forward gives counts, and no recomputation makes it smaller: a budget that is missed by little takes little
    work, and few plans."""

    class Tall(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.GELU()) for _ in range(12)))
            self.head = nn.Linear(32, 4000)

        def forward(self, x):
            return self.head(self.layers(x))

    step = memory.PredictedStep(Tall(), ((torch.ones(64, 32),), {}), "none")
    kept, least = step.peak(MemoryGoal(0, 1 << 40)), step.peak(MemoryGoal(ALL_AGAIN, 0))
    goal = MemoryGoal(0, kept.total - (kept.total - least.total) // 8)
    peak = step.peak(goal)
    assert least.total <= peak.total <= goal.budget < kept.total
    assert 0 < peak.extra_work < least.extra_work / 4
    assert step.plan(goal).compiles <= 4
    assert step.peak(MemoryGoal(0, least.total)).total <= least.total


def test_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "script_of_a_test.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["memory", "script_of_a_test:make", "--budget", "64KiB", "--optimizer", "adam"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("peak ") and "budgets" in text and "0.weight" in text
    stored, again = map(int, re.findall(r"^(?:largest|with ORTMODULE_MEMORY_BUDGET).*: (\d+)$", text, re.M))
    assert 16 < stored <= again
    assert main(["memory", "script_of_a_test:make", "--budget", "1KiB"]) == 1
    assert "error: a batch of 1 does not fit in 1024 bytes" in capsys.readouterr().err
    wrong = {
        "script_of_a_test": "it is MODULE:FUNCTION",
        "no_such_script:f": "No module named",
        "script_of_a_test:nothing": "returns a model and a batch, not NoneType",
    }
    for target, reason in wrong.items():
        assert main(["memory", target]) == 1 and reason in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["memory", "script_of_a_test:make", "--budget", "many"])
    assert "many: the budget is a number of bytes, as 8GiB" in capsys.readouterr().err


# --- afterwards, and what does not fit --------------------------------------------------------------------------------


def test_explain_has_the_peak_of_all_steps():
    model = ORTModule(Small())
    large, small = memory.predict(model, IDS), memory.predict(model, IDS[:2])
    for ids in (IDS[:2], IDS, IDS[:2]):
        model(ids).sum().backward()
    report = explain(model)
    assert report.peak == large and report.peak_bytes == large.arena > small.arena
    assert re.search(
        r"peak +[\d.]+ MiB \(activations .*, workspace .*\), beside parameters .*, gradients ", str(report)
    )


def test_the_memory_that_is_printed_agrees(monkeypatch, caplog):
    monkeypatch.setenv("ORTMODULE_PRINT_MEMORY_STATS", "1")
    model = ORTModule(Small(256))
    ids = torch.randint(50, (64, 64))
    for _ in range(2):
        model(ids).sum().backward()
        model.zero_grad()
    text = [record.getMessage() for record in caplog.records if "after forward" in record.getMessage()][-1]
    printed = float(re.search(r"\| allocated: ([\d.]+)", text)[1])
    assert abs(printed - explain(model).peak_bytes / MB) <= 0.06  # its last digit, and a header
    assert explain(model).peak_bytes == memory.predict(model, ids).arena


class Growing(nn.Module):
    """Small inputs, large activations."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.tanh(x.unsqueeze(1) * self.weight * torch.ones(1, 1 << 16, 1)).sum()


def test_a_batch_that_does_not_fit_changes_nothing():
    """The error comes before the step, names what is large, and the next step runs."""
    torch.manual_seed(0)
    model = ORTModule(Growing())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    before = [
        *(p.detach().clone() for p in model.parameters()),
        *(s["momentum_buffer"] for s in optimizer.state.values()),
    ]
    rows = _core.memory_limits()["most"] >> 18
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"out of memory: .* the largest: \w+ \(.*\) with \d+ bytes"):
            model(torch.ones(rows, 4))
    now = [*(p.detach() for p in model.parameters()), *(s["momentum_buffer"] for s in optimizer.state.values())]
    assert same_bits(before, now)
    optimizer.zero_grad()
    model(torch.ones(3, 4)).backward()
    optimizer.step()
    assert not explain(model).fallback
