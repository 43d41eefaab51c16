"""scripts/gpu: parts stop, go on, and become a report; what runs on a GPU is not run here."""

import importlib.util
import json
import sys
import time
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ortmodule import _core
from ortmodule.session import Run

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


def test_the_page_names_the_parts(gpu):
    """Figures that are open stand beside the numbers of the parts that measure them."""
    page = (ROOT / "docs" / "benchmarks-gpu.md").read_text()
    rows = [line.split("|") for line in page.partition("## Figures that are open")[2].splitlines() if line[:1] == "|"]
    named = {figure.strip(): part.strip() for _, figure, _, part, _ in rows[2:]}
    assert not any(part == "none" for part in named.values())
    numbers = {int(n) for part in named.values() for n in part.replace("to", ",").replace("the same", "1").split(",")}
    assert max(numbers) == len(gpu.PARTS)
    names = [name for name, _, _ in gpu.PARTS]
    for start, words in (("Attention by torch", "attention by torch"), ("Products with", "products: epilogues")):
        (part,) = (part for figure, part in named.items() if figure.startswith(start))
        assert names[int(part) - 1].startswith(words)
    assert [i for i, name in enumerate(names, 1) if name.startswith(gpu.LITTLE[0])] == [21, 32]


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


# --- what the engine chooses between (benchmarks/choices.py) ----------------------------------------------------------


@pytest.fixture
def choices(monkeypatch):
    """With small sizes, one of each kind, and short turns."""
    from benchmarks import choices as module

    small = [{**size, "heads": 2} for size in module.ATTENTION[:1] + module.ATTENTION[-1:]]
    for size in small:
        size["length"] = 24
    sizes = {"attention": small, "products": [{**module.PRODUCTS[0], "tokens": 8, "width": 16}]}
    for name, subject in module.SUBJECTS.items():
        monkeypatch.setitem(module.SUBJECTS, name, replace(subject, sizes=sizes[name]))
    monkeypatch.setattr(module, "A_WHILE", 1e-4)
    yield module
    _core.tuning_clear()


def choose(choices, subject, tmp_path):
    code = choices.run(SimpleNamespace(subject=subject, device="cpu", turns=3, out=str(tmp_path / "train")))
    return code, json.loads((tmp_path / "train.json").read_text())["rows"], (tmp_path / "train.md").read_text()


def test_attention_in_both_ways(choices, tmp_path):
    code, rows, text = choose(choices, "attention", tmp_path)
    assert code == 0 and len(rows) == 2
    for row in rows:
        assert all(way["median"] > 0 for way in row["ways"].values())
        assert row["ways"]["one operator"]["kernels"] in ("ours", "torch")
    assert "| bfloat16 | 1 | 24 | False | 2 |" in text and "| float16 | 1 | 24 | True | 2 |" in text
    assert text.count("one operator is faster") == 2


@pytest.mark.parametrize("causal", [False, True])
def test_both_ways_are_attention(choices, causal):
    size = {"dtype": "bfloat16", "batch": 2, "length": 40, "heads": 2, "causal": causal}
    ways, results = choices.attention(size, "cpu"), []
    (a, b), (shape, *_) = [[x.plan.text() for x in ways.values()], [x.dy.shape for x in ways.values()]]
    assert "FusedAttention(" not in a and "FusedAttentionGrad(" in b
    inputs = [x.float().transpose(1, 2).requires_grad_() for x in ways["products"].inputs]
    y = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal).transpose(1, 2)
    for way in ways.values():
        way.inputs, way.dy = ways["products"].inputs, torch.ones(shape, dtype=torch.bfloat16)
        made = Run(way.plan, way.inputs, 0)
        results.append([made.outputs[0], *made.backward([way.dy])])
    expected = [y, *(g.transpose(1, 2) for g in torch.autograd.grad(y.sum(), inputs))]
    for found in results:
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.float() - theirs).abs().max() <= 3e-2 * max(1, theirs.abs().max())


def test_products_in_all_ways(choices, tmp_path):
    code, (row,), text = choose(choices, "products", tmp_path)
    assert code == 0 and list(row["ways"]) == ["chains", "chains, measured", "epilogues", "epilogues, measured"]
    assert row["ways"]["epilogues, measured"]["products"] > 0
    assert "| bfloat16 | 8 | 16 |" in text


def test_rows_that_are_there_are_not_measured_again(choices, monkeypatch, tmp_path):
    """One that failed is, and the table says why."""
    asked, subject = [], choices.SUBJECTS["attention"]

    def ways(size, device):
        asked.append(size["dtype"])
        if len(asked) == 2:
            raise torch.OutOfMemoryError("no memory for scores")
        return subject.ways(size, device)

    monkeypatch.setitem(choices.SUBJECTS, "attention", replace(subject, ways=ways))
    code, _, text = choose(choices, "attention", tmp_path)
    assert code == 1 and "failed: OutOfMemoryError: no memory for scores" in text and "is faster" not in text
    code, rows, text = choose(choices, "attention", tmp_path)
    assert code == 0 and asked == ["bfloat16", "float16", "float16"] and text.count("is faster") == 2
    assert choose(choices, "attention", tmp_path)[1] == rows and len(asked) == 3


def test_from_how_many_scores_on(choices):
    assert choices.faster_from([(1, 0.5), (4, 1.2), (2, 0.9), (8, 1.5)]) == 4
    assert choices.faster_from([(1, 1.5), (4, 1.2), (4, 0.9), (8, 1.5)]) == 8
    assert choices.faster_from([(1, 1.5), (4, 1.2)]) == 1
    assert choices.faster_from([(1, 1.5), (8, 0.9)]) is None
