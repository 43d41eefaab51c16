"""Runs tests written as ONNX Runtime's own by scripts/original_tests.py: each kind is told apart, and counted."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "original_tests.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the sources are not there")

TESTS = """
import pytest, torch
from onnxruntime.training.ortmodule import ORTModule
from onnxruntime.training.ortmodule import _fallback, _utils
from onnxruntime.training.ortmodule._graph_execution_manager_factory import GraphExecutionManagerFactory
from onnxruntime.capi import _no_such_state

def wrapped():
    return ORTModule(torch.nn.Linear(3, 2).to("cuda:0"))

def test_passed():
    x = torch.ones(4, 3).cuda()
    model = wrapped()
    model(x).sum().backward()
    assert model.weight.grad.shape == (2, 3) and _fallback._FallbackPolicy.FALLBACK_DISABLE

def test_private_attribute():
    assert wrapped()._torch_module

def test_private_function():
    _utils.get_random_states()

def test_private_class():
    GraphExecutionManagerFactory(None, None)

def test_private_binding():
    _no_such_state.get_all_opset_versions()

def test_private_text():
    assert not hasattr(wrapped(), "_torch_module") and type(wrapped()).__name__ == "_ORTModule"

def test_memory():
    torch.cuda.memory_allocated()

def test_skipped():
    pytest.skip("no reason")

@pytest.mark.parametrize("what", ["_torch_module", "weight"])
def test_failed(what):
    assert not hasattr(torch.nn.Linear(3, 2), what)
    raise AttributeError(what)
"""


def test_kinds_of_what_came_of_tests(tmp_path, capsys):
    from scripts.original_tests import main

    folder, out = tmp_path / "tests", tmp_path / "out"
    folder.mkdir()
    (folder / "some_test.py").write_text(TESTS)
    (folder / "broken.py").write_text("import a_name_that_is_no_module")
    (folder / "conftest.py").write_text("raise ImportError('of the original')")
    assert main([str(folder), "some_test", "broken", "--out", str(out)]) == 0
    found = json.loads((out / "original.json").read_text())
    kinds = {name.partition("::")[2].partition("[")[0]: kind for name, (kind, _) in found["some_test"].items()}
    assert kinds == {
        "test_passed": "passed", "test_private_attribute": "private", "test_private_function": "private",
        "test_private_class": "private", "test_private_binding": "private", "test_private_text": "private",
        "test_memory": "CUDA", "test_skipped": "skipped", "test_failed": "failed",
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "some_test.py::test_failed[weight]: AssertionError" in said
    assert "broken.py: pytest ended with 2" in said and "a_name_that_is_no_module" in said
    assert "| `some_test.py` | 1 | 2 | 5 | 1 | 0 | 0 | 1 |" in said and "| all | 1 | 3 | 5 | 1 | 0 | 0 | 1 |" in said
