"""scripts/gpu: parts stop, go on, and become a report; what runs on a GPU is not run here."""

import importlib.util
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

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
    from benchmarks.rows import LARGE

    assert set(gpu.LARGE) == set(LARGE)


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


def test_part_that_takes_too_long_is_stopped(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "SECONDS", 1)
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(gpu, "PARTS", [("slow", "benchmark", slow)])
    assert gpu.run_parts([1], tmp_path) == 1
    assert "stopped" in json.loads((tmp_path / "part-01" / "result.json").read_text())["state"]
