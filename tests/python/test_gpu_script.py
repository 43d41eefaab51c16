"""scripts/gpu: parts stop, go on, and become a report; what runs on a GPU is not run here."""

import importlib.util
import json
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert {value} == 2, "one is not two"

def test_left_out():
    pytest.skip("no CUDA kernel")
"""


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module, without what needs a GPU."""
    loader = SourceFileLoader("scripts_gpu", str(ROOT / "scripts" / "gpu"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("scripts_gpu", loader))
    loader.exec_module(module)
    monkeypatch.setattr(module, "about", lambda: {"device": "a GPU", "driver": "1.2"})
    monkeypatch.setattr(module, "environment", lambda: None)
    return module


def part_of_tests(tmp_path, value):
    file = tmp_path / "test_part.py"
    file.write_text(TESTS.format(value=value))
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    return ("some tests", "tests", [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(file)])


def test_every_part_is_there(gpu):
    kinds = [kind for _, kind, _ in gpu.PARTS]
    assert set(kinds) == {"tests", "benchmark"}
    assert len({name for name, _, _ in gpu.PARTS}) == len(gpu.PARTS)
    from benchmarks.rows import LARGE, LITTLE

    assert set(gpu.LARGE) == set(LARGE) and set(gpu.LITTLE) == set(LITTLE)


def test_part_goes_on_where_it_was(gpu, monkeypatch, tmp_path):
    """What has passed is not run again; a failure is in the record with its reason."""
    results = tmp_path / "results"
    monkeypatch.setattr(gpu, "PARTS", [part_of_tests(tmp_path, 1)])
    assert gpu.run_parts([1], results) == 1
    record = json.loads((results / "part-01" / "result.json").read_text())
    assert record["counts"] == {"passed": 1, "failed": 1, "skipped": 1}, (results / "part-01" / "log").read_text()
    assert "one is not two" in record["failures"][0] and record["state"] == "exit status 1"
    monkeypatch.setattr(gpu, "PARTS", [part_of_tests(tmp_path, 2)])
    assert gpu.run_parts([1], results) == 0
    record = json.loads((results / "part-01" / "result.json").read_text())
    assert record["counts"] == {"passed": 2, "failed": 0, "skipped": 1} and record["state"] == "done"


def test_report_has_what_ran_and_nothing_else(gpu, monkeypatch, tmp_path):
    results = tmp_path / "results"
    missing = ("a tool", "tests", ["no-such-sanitizer"])
    monkeypatch.setattr(gpu, "PARTS", [part_of_tests(tmp_path, 2), missing, ("never run", "tests", ["true"])])
    assert gpu.run_parts([1, 2], results) == 0
    gpu.report(results)
    text = (results / "report.md").read_text()
    assert "device a GPU, driver 1.2" in text
    assert "| some tests | 2 | 0 | 1 | done |" in text
    assert "not run: there is no no-such-sanitizer" in text
    assert "never run" not in text
    assert [p["part"] for p in json.loads((results / "report.json").read_text())["parts"]] == [1, 2]


SLOW = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def is_running(pid):
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_part_that_takes_too_long_is_stopped(gpu, monkeypatch, tmp_path):
    """With what it has started, which would keep the GPU."""
    monkeypatch.setattr(gpu, "SECONDS", 3)
    slow = [sys.executable, "-c", SLOW, str(tmp_path / "child")]
    monkeypatch.setattr(gpu, "PARTS", [("slow", "benchmark", slow)])
    assert gpu.run_parts([1], tmp_path) == 1
    assert "stopped" in json.loads((tmp_path / "part-01" / "result.json").read_text())["state"]
    pid = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)


# --- what is measured there (benchmarks/large.py) ---------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    from benchmarks import large, rows

    config = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 61, "n_positions": 32}
    row = rows.large("tiny", rows.hf("GPT2LMHeadModel", "GPT2Config", **config), rows.language, 4, 12, 61)
    monkeypatch.setitem(rows.EVERY, "bert-small", row)
    return large, row


def arguments(**more):
    plain = {"device": "cpu", "dtype": torch.float32, "autocast": None, "steps": 3, "memory": 1 << 40, "fill": 0.5}
    return SimpleNamespace(**{**plain, "row": "bert-small", "batch": 4, **more})


@pytest.mark.parametrize("column", ["eager", "ortmodule"])
def test_a_column_is_measured(tiny, column):
    large, row = tiny
    found = large.measure(row, arguments(column=column, autocast=torch.bfloat16))
    assert found["step"]["median"] > 0 and found["first_step"] > 0 and found["peak_bytes"] > 0
    assert found["busy"] is None and 2 < found["loss"] < 6


def test_a_batch_that_fills_memory(tiny):
    large, row = tiny
    assert large.samples_that_fit([(4, 140), (8, 180)], 300) == 16  # 100 bytes and 10 a sample: 20, a multiple of 8
    assert large.samples_that_fit([(4, 140), (8, 180)], 171) == 7
    assert large.samples_that_fit([(4, 140), (8, 180)], 50) == 1
    found = large.look_for_batch(row, arguments())
    assert [count for count, _ in found["points"]] == [4, 8] and found["batch"] % 8 == 0


def test_share_of_time(tiny):
    """Kernels that overlap count once; time before the first and after the last is not looked at."""
    large, _ = tiny
    assert large.share_of_time([]) is None
    assert large.share_of_time([(2, 4), (3, 5), (3, 4), (9, 12), (10, 11)]) == 0.6
    assert large.share_of_time([(0, 10), (2, 3)]) == 1


@pytest.mark.parametrize("name", ["bert-large-padded", "t5-base-padded", "llama-1b-padded"])
def test_half_of_a_batch_is_padding(name):
    from benchmarks.rows import LARGE

    batch = LARGE[name].sized(64)(torch.Generator().manual_seed(0))
    mask, labels = batch["attention_mask"].bool(), batch["labels"]
    assert 0.4 < mask.float().mean() < 0.6 and mask[0].all()
    assert (batch["input_ids"][~mask] == 0).all()
    if name == "llama-1b-padded":
        assert torch.equal(labels != -100, mask)
    elif name == "t5-base-padded":
        assert 0.4 < (labels != -100).float().mean() < 0.6
    else:
        assert (labels[~mask] == -100).all() and (labels != -100).any()


def test_columns_that_are_there_are_not_asked_again(tiny, monkeypatch, tmp_path, capsys):
    """One that failed is asked again; what cannot be measured, and what failed, is in the table with its reason."""
    large, _ = tiny
    asked, answers = [], {"eager": {}, "ortmodule": {}, "liger": {"missing": "Liger-Kernel is not installed"}}
    for name, milliseconds, size in (("eager", 40, 200), ("ortmodule", 20, 120)):
        step = {"median": milliseconds / 1e3, "low": milliseconds / 1e3, "high": milliseconds / 1e3}
        answers[name] = {"step": step, "first_step": 2.0, "peak_bytes": size * 10**9, "busy": 0.985, "loss": 3.5}

    def child(command, **_):
        name = command[command.index("--column") + 1]
        asked.append(name)
        if name in answers:
            Path(command[command.index("--answer") + 1]).write_text(json.dumps(answers[name]))
        return SimpleNamespace(returncode=name not in answers, stderr="Traceback\nRuntimeError: no memory\n")

    monkeypatch.setattr(large.subprocess, "run", child)
    columns = ["eager", "compile", "liger", "ortmodule"]
    args = arguments(columns=columns, fill=None, out=str(tmp_path / "train"))
    assert large.run(args) == 1 and asked == columns
    assert large.run(args) == 1 and asked == [*columns, "compile"]
    text = (tmp_path / "train.md").read_text()
    assert "| compile | failed: RuntimeError: no memory |" in text
    assert "| liger | Liger-Kernel is not installed |" in text
    assert "| ortmodule | 20 ±0 | 200 | 2.00 | – | 120.00 | 60% | 98.5% | 2.0 | 3.500 |" in text
    answers["compile"] = {**answers["eager"], "step": {"median": 0.03, "low": 0.03, "high": 0.03}}
    assert large.run(args) == 0
    assert "| ortmodule | 20 ±0 | 200 | 2.00 | 1.50 |" in (tmp_path / "train.md").read_text()
    assert json.loads((tmp_path / "train.json").read_text())["columns"]["liger"] == answers["liger"]
