"""The benchmarks' commands, with a model of two layers: what they write, and that both sides learn the same."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    alive,
    columns,
    kernels,
    largest_batch,
    losses,
    memory,
    predicted,
    public_programs,
    public_rows,
    public_sizes,
    report,
    rows,
    train,
)
from ortmodule.memory import HeldTensor, Peak

CONFIG = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 32}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(train, "TOUCHED", 1 << 20)
    build = rows.hf("GPT2LMHeadModel", "GPT2Config", **CONFIG)
    monkeypatch.setitem(rows.EVERY, "gpt2", rows.Row("tiny", build, rows.language(4, 12, 61)))


def run(module, monkeypatch, out, *arguments):
    """The report that the command has written."""
    monkeypatch.setattr(sys, "argv", [module.__name__, "--rows", "gpt2", "--out", str(out), *arguments])
    module.main()
    return json.loads(out.with_suffix(".json").read_text()), out.with_suffix(".md").read_text()


def test_train(tmp_path, monkeypatch):
    few = ["--steps", "2", "--warmup", "1", "--new-shapes", "1", "--losses", "12", "--no-memory", "--plot"]
    written, table = run(train, monkeypatch, tmp_path / "train", *few)
    found = written["rows"]["gpt2"]
    assert list(found) == ["eager", "ortmodule"] and found["eager"]["speedup"]["median"] == 1
    for figures in found.values():
        step, phases = figures["step"]["median"], figures["phases"]
        assert figures["speedup"]["low"] <= figures["speedup"]["median"] <= figures["speedup"]["high"]
        assert figures["slowest_minus_warm"] >= 0
        assert 0 < step < 10 * figures["first_step"] and set(phases) == {"forward", "backward", "optimizer"}
        assert figures["tokens"] == 48 and figures["new_shape"] is not None and 3.5 < figures["last_loss"] < 4.5
    assert table.count("| tiny |") == 2 and (tmp_path / "train.png").stat().st_size > 0


#: Seconds of two columns' steps in the same turns, of a machine that was three times as slow in some of these.
EAGER, OURS = [4.0, 12.0, 4.4, 12.0, 4.0], [2.0, 6.0, 2.0, 5.0, 2.0]


def test_speed_is_of_one_turn():
    """Median and quartiles are of the same quotients (2.0, 2.0, 2.2, 2.4, 2.0), where medians' quotient is 2.2."""
    found = report.speedup(EAGER, OURS)
    assert found == {"median": 2, "low": 2, "high": pytest.approx(2.3)}
    assert report.speedup([3.0], [2.0]) == {"median": 1.5, "low": 1.5, "high": 1.5}


class Clocked:
    """A column whose steps take these times, the first of them and a warm one apart."""

    def __init__(self, seconds):
        self.seconds = iter([9.0, 9.0, *seconds])

    def step(self, batch):
        seconds = next(self.seconds)
        return [seconds / 4, seconds / 2, seconds / 4]

    def close(self):
        pass


def test_the_table_has_the_speed_of_turns(monkeypatch):
    columns_ = {"eager": Clocked(EAGER), "ortmodule": Clocked(OURS)}
    monkeypatch.setattr(train, "trainee_of", lambda name, key, model, args: columns_[name])
    args = argparse.Namespace(dtype=torch.float32, warmup=1, steps=len(OURS), new_shapes=0, losses=0)
    figures = train.measure("gpt2", list(columns_), args)
    assert figures["ortmodule"]["speedup"]["median"] == 2 and figures["eager"]["speedup"]["median"] == 1
    table = report.markdown({"machine": report.machine(), "steps": len(OURS), "rows": {"gpt2": figures}})
    assert "| 2.00× (2.00–2.30) |" in table and "| 2000 ±1750 |" in table and "in each turn" in table


def test_losses(tmp_path, monkeypatch):
    report, table = run(losses, monkeypatch, tmp_path / "losses", "--steps", "40", "--seeds", "1", "2")
    found = report["rows"]["gpt2"]
    ends = {column: [run["last"] for run in seeds.values()] for column, seeds in found.items()}
    assert set(ends) == {"eager", "ortmodule"} and all(len(last) == 2 for last in ends.values())
    for seeds in found.values():
        for run_ in seeds.values():
            assert run_["last"] < run_["curve"][0], "nothing was learned"
    for ours, eager in zip(ends["ortmodule"], ends["eager"], strict=True):
        assert abs(ours - eager) < 0.01
    assert "| tiny |" in table


def test_losses_of_a_part_of_each_batch(tmp_path, monkeypatch):
    whole, part = (
        run(losses, monkeypatch, tmp_path / "losses", "--steps", "3", "--seeds", "1", *more)
        for more in ((), ("--samples", "2"))
    )
    assert part[0]["samples"] == 2 and "3 steps, 2 samples of each batch" in part[1] and "samples" not in whole[1]
    first = [report["rows"]["gpt2"]["eager"]["1"]["curve"][0] for report, _ in (whole, part)]
    assert first[0] != first[1]


def test_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "keep_memory", lambda: None)
    monkeypatch.setattr(kernels, "WIDTH", 64)
    few = ["--only", "Add", "MatMul", "--megabytes", "1", "--turns", "3", "--out", str(tmp_path / "kernels")]
    monkeypatch.setattr(sys, "argv", ["kernels", *few])
    kernels.main()
    found = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert [(row["kernel"], row["dtype"], row["phase"]) for row in found] == [
        (kernel, dtype, phase)
        for kernel in ("Add", "MatMul")
        for dtype in ("float32", "bfloat16")
        for phase in ("forward", "backward")
    ]
    for row in found:
        assert min(row["seconds"], row["of_a_copy"], row["copy_bytes_per_second"]) > 0
        handed_on = row["kernel"] == "Add" and row["phase"] == "backward"  # ATen gives back the gradient that it got
        assert (row["speed"] is None) == (row["aten_seconds"] is None) == handed_on
        assert (row["flops_per_second"] is None) == (row["kernel"] == "Add")
    assert (tmp_path / "kernels.md").read_text().count("| Add |") == 4


def test_quotients_are_of_one_turn():
    """A machine that was twice as fast in the last turns was so for both."""
    assert kernels.quotient([6.0, 8.0, 3.0, 3.0, 9.0], [2.0, 2.0, 1.0, 1.0, 1.0]) == 3


def test_learning_rate():
    """Rises over the first tenth, falls to 0 at the end."""
    row = rows.EVERY["gpt2"]
    trainee = columns.Trainee(columns.COLUMNS["eager"], row.build())
    trainee.plan(20)
    rates = []
    for _ in range(20):
        rates.append(trainee.optimizer.param_groups[0]["lr"])
        trainee.step(row.batch(torch.Generator().manual_seed(0)))
    assert rates[0] == 0 and rates[2] == max(rates) == 1e-4
    assert rates[2:] == sorted(rates[2:], reverse=True) and trainee.optimizer.param_groups[0]["lr"] == 0


def test_what_is_alive_is_summed_over_layers():
    def held(kind, module, name, count):
        return HeldTensor(kind, module, name, count, "float32", (count // 4,))

    tensors = [held("activation", f"layers.{i}.linear", "MatMul", 400) for i in range(3)]
    tensors += [held("activation", "head", "gradient at MatMul", 80), held("workspace", "head", "Softmax", 40)]
    tensors.append(held("parameter", "head", "weight", 4000))
    peak = Peak(4000, 0, 0, 0, 1280, 40, 0, tensors=tensors)
    assert [line[:4] for line in alive.lines_of(peak)] == [
        (1200, 3, "layers.*.linear", "MatMul"), (80, 1, "head", "MatMul"), (40, 1, "head", "Softmax"),
    ]  # fmt: skip
    text = alive.section("gpt2", False, peak)
    assert "| 1.2 KiB | 91 % | 3 | layers.*.linear | MatMul | float32[100] | forward made it, backward reads it" in text


def test_orders_are_beside_the_written_one():
    lines = alive.order_lines([("bert-base", True, {"as written": 4 << 20, "latest": 3 << 20})])
    assert lines[0] == "| model | type | as written | latest |"
    assert lines[2] == "| BERT-base masked LM, 8×128 | bfloat16 autocast | 4.0 MiB | 0.750 |"


def test_what_is_predicted_is_taken(tmp_path, monkeypatch):
    """The arena to the page. malloc is not preloaded here: the engine's blocks are what grows."""
    build = rows.hf("GPT2LMHeadModel", "GPT2Config", **CONFIG | {"n_embd": 64, "n_layer": 4, "n_positions": 64})
    monkeypatch.setitem(rows.EVERY, "gpt2", rows.Row("small", build, rows.language(64, 64, 61)))
    monkeypatch.setenv("LD_PRELOAD", str(memory.counting_malloc(tmp_path)))
    monkeypatch.setenv("ORTMODULE_KEEP_MEMORY", "0")
    found = predicted.run("gpt2", "float32")
    assert found["arena"]["predicted"] == found["arena"]["taken"] > 10 << 20
    assert 0.5 < found["process"]["taken"] / found["process"]["predicted"] <= 1.03
    assert f"| {found['arena']['taken'] / 1e6:,.1f} |" in predicted.line("gpt2", "float32", found)
    assert "no memory" in predicted.line("gpt2", "float32", {"failed": "no memory"})


def test_batches_are_planned_without_a_step(monkeypatch):
    build = rows.hf("GPT2LMHeadModel", "GPT2Config", **CONFIG | {"n_embd": 64, "n_layer": 4, "n_positions": 64})
    monkeypatch.setitem(
        rows.EVERY, "gpt2", rows.Row("small", build, None, sized=lambda count: rows.language(count, 64, 61))
    )
    found = {way: largest_batch.planned("gpt2", way, 100 << 20) for way in ("ortmodule", "level-1")}
    assert 0 < found["ortmodule"]["size"] < found["level-1"]["size"]
    assert all(of["bytes"] <= 100 << 20 for of in found.values())
    lines = largest_batch.table_of_plans("gpt2", 100 << 20, found)
    assert any(line.startswith(f"| ORTModule | {found['ortmodule']['size']} | 0.1") for line in lines)


@pytest.mark.full
def test_memory_of_ways(tmp_path, monkeypatch):
    """Less of it where more is computed again. malloc is not preloaded here: what counts is the engine's."""
    build = rows.hf("GPT2LMHeadModel", "GPT2Config", **CONFIG | {"n_embd": 64, "n_layer": 4, "n_positions": 64})
    monkeypatch.setitem(rows.EVERY, "gpt2", rows.Row("small", build, rows.language(16, 64, 61)))
    library = memory.counting_malloc(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    taken = {}
    for way in "ortmodule", "half", "least", "level-1":
        steps = memory.Steps("gpt2", way, None)
        seconds, taken[way] = [steps.run(adds=False), steps.run(adds=False)][1]
        assert seconds > 0
        if way != "least":  # a budget with room for nothing more
            assert steps.run(adds=True)[1] > 0
    assert taken["ortmodule"] > taken["half"] > taken["least"] > 0 and taken["level-1"] < taken["ortmodule"]


@pytest.mark.full
def test_the_processes_of_ways(tmp_path):
    """Each answers all that it is asked, to the end: of PyTorch's no arena is known."""
    args = argparse.Namespace(ways=["eager", "ortmodule"], autocast=None, steps=1)
    found = memory.measure("minilm", args, memory.counting_malloc(tmp_path))
    for of in found.values():
        assert all(seconds > 0 for seconds in of["seconds"])
        assert all(of["bytes"][what] > 0 for what in ("step", "adding", "alone")), of
    assert found["ortmodule"]["bytes"]["step"] < found["eager"]["bytes"]["step"]


def test_the_table_of_memory():
    found = {
        "eager": {"seconds": [2.0, 2.0, 2.2], "bytes": {"step": 300e6, "adding": 310e6}},
        "half": {"seconds": [1.0, 1.2, 1.1], "bytes": {"step": 150e6, "adding": None}},
        "compile": {"failed": "no compiler"},
    }
    lines = memory.table("gpt2", found)
    assert "| eager | 300 (1.00) | 310 (1.00) | 2000 ±100 | 1.00 [1.00, 1.00] |" in lines
    assert any("| 150 (0.50) | – | 1100 " in line and "| 0.50 [" in line for line in lines)
    assert any("no compiler" in line for line in lines)
    found["eager"] = {"failed": "it ended"}
    assert any("| 150 | – | 1100 " in line and line.endswith("| – |") for line in memory.table("gpt2", found))


#: A program as many are: a script, which sets weights by NumPy, in annotations names what it does not import, and would
#: train when it is run.
SCRIPT = """
from __future__ import annotations
import argparse
import numpy
import torch
from dataclasses import dataclass
from no_package_of_this_name import drawing

WIDTH = 5

@dataclass
class Config:
    width: Union[int, str] = WIDTH

class Net(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(numpy.random.randn(config.width, 3)).float())

    def forward(self, x):
        return (given(x) @ self.weight.T).tanh()

args = argparse.ArgumentParser().parse_args(["--unknown"])
raise SystemExit("it trains")
"""


def test_a_public_program(tmp_path, monkeypatch):
    (tmp_path / "sources" / "script").mkdir(parents=True)
    (tmp_path / "sources" / "script" / "main.py").write_text(SCRIPT)

    def build(find):
        module = find("script/main.py", given=torch.sin)
        return module.Net(module.Config())

    batch = public_rows.images("x", 3)
    found = {"script: Net": public_rows.Row("script", "Net", build, batch),
             "lost: Net": public_rows.Row("lost", "Net", lambda find: find("lost/main.py"), batch)}  # fmt: skip
    monkeypatch.setattr(public_programs, "ROWS", found)
    where = ["--sources", str(tmp_path / "sources"), "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page")]
    monkeypatch.setattr(sys, "argv", ["public_programs", *where])
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as ended:
            public_programs.main()
    finally:
        torch.set_num_threads(threads)
    assert not ended.value.code, "nothing is wrong"
    written, page = json.loads((tmp_path / "out.json").read_text()), (tmp_path / "page").read_text()
    assert written["script: Net"]["state"] == "right" and written["script: Net"]["work"] == 1
    assert "lost/main.py is not in the folder of sources" in written["lost: Net"]["right"]
    assert (
        page.startswith(public_programs.HEAD)
        and "\n1 models, 1 right. 1 have at least 90%" in page
        and "lost" not in page
    )


def test_times_of_public_programs():
    rows = {"a: A": {"time": 0.5}, "b: B": {"time": 1.02}, "c: C": {"time": 1.2}, "d: D": {}}
    said = " ".join(public_programs.timed(rows).split())
    assert "1.02 in the middle, at most 1.03 for 2 of 3 models. More: c: C 1.20." in said
    assert public_programs.timed({"d: D": {}}) == ""


def test_programs_at_their_own_sizes(tmp_path, monkeypatch):
    """They are measured by themselves, and stand in a table of the page; what was measured before is kept."""
    batch = public_rows.images("input", 3)
    row = public_rows.Row("script", "Net", lambda find: Twice(), batch, note="it is small")
    before = {"script: Net": {"state": public_programs.trial.UNBUILT}}
    monkeypatch.setattr(public_programs, "ROWS", {"script: Net": row, "other: Net": row})
    monkeypatch.setattr(public_programs, "SIZES", {"script: Net": ("two rows", row)})
    (tmp_path / "out.json").write_text(json.dumps(before))
    where = ["--own-sizes", "3", "--out", str(tmp_path / "out"), "--page", str(tmp_path / "page")]
    monkeypatch.setattr(sys, "argv", ["public_programs", *where])
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit):
            public_programs.main()
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == {"script: Net"} and found["script: Net"]["state"] == public_programs.trial.UNBUILT
    assert found["script: Net"]["own"]["time"] > 0 and found["script: Net"]["own"]["eager"] > 0
    assert "\n| script: Net | two rows | " in (tmp_path / "page").read_text()
    found["script: Net"]["own"]["time"] = 1.5
    assert public_programs.at_own_sizes(found).rstrip().endswith("| 1.50 | it is small |")
    assert public_programs.at_own_sizes(before) == ""


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, input):
        return self.linear(input) * 2


def test_rows_at_their_own_sizes_are_rows():
    assert public_sizes.SIZES.keys() <= public_rows.ROWS.keys()
    for name, (said, row) in public_sizes.SIZES.items():
        assert name == f"{row.program}: {row.model}" and said
    citations = public_sizes.SIZES["pygcn: GCN"][1].batch(0, torch.Generator().manual_seed(0))
    assert citations["x"].shape == (2708, 1433) and citations["adj"].layout is torch.sparse_coo
    torch.testing.assert_close(citations["adj"].to_dense().sum(1), torch.ones(2708))


def test_the_page_of_public_programs():
    """It has rows that there are, as they are, each once, and counts what it has."""
    groups = public_rows.VITS, public_rows.TRANSFORMERS, public_rows.DIFFUSION, public_rows.FILES
    assert len(public_rows.ROWS) == sum(map(len, groups)), "two rows have one name"
    page = Path("docs/public-programs.md").read_text()
    assert page.startswith(public_programs.HEAD)
    first, *_ = page.split("\n\nSeconds of a step")
    lines = [line for line in first.splitlines() if line.startswith("| ")][2:]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    names = [f"{program}: {model}" for program, model, *_ in table]
    assert names == [name for name in public_rows.ROWS if name in names]
    right = sum(cells[2].startswith("right") for cells in table)
    reached = [int(cells[3][:-1]) >= 90 and int(cells[4][:-1]) >= 90 for cells in table]
    assert f"\n{len(table)} models, {right} right. {sum(reached)} have at least 90% of the calls" in page
    assert f"\nengine. {sum(cells[5] != '–' for cells in table)} have islands: " in page
    assert page.count("\n- ") == len(table) - sum(reached), "those with less are named"
    for _, model, _, calls, _, islands, why in table:
        assert why != "–" or islands != "–" or int(calls[:-1]) >= 90, f"{model}: why does PyTorch run it?"
