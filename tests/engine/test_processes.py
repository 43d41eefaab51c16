"""Forked children and subinterpreters: they compute, or are told why not; they never hang."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program, seconds=240):
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, cwd=ROOT, timeout=seconds, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


FORK = """
    import os, signal, sys
    import torch
    from torch import nn
    from ortmodule import ORTModule

    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Softmax(-1), nn.Linear(512, 512))
    wrapped = ORTModule(model)
    x = torch.randn(512, 512)
    wrapped(x).sum().backward()
    with torch.no_grad():
        expected = wrapped(x)
    before = torch.get_num_threads()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        with torch.no_grad():
            found = wrapped(x)
        os._exit(0 if torch.allclose(found, expected) else 1)
    status = os.waitpid(child, 0)[1]
    assert torch.get_num_threads() == before == 2
    assert status == 0, status
"""


def test_forked_child_uses_one_thread():
    run(FORK)


INTERPRETER = """
    import sys
    sys.path.insert(0, {path!r})
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("ortmodule._core", {core!r})
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        import os
        os.write(1, str(error).encode())
"""


@pytest.mark.skipif(find_spec("_xxsubinterpreters") is None, reason="this Python has no module for subinterpreters")
def test_subinterpreter_is_refused():
    from ortmodule import _core

    inner = textwrap.dedent(INTERPRETER.format(path=str(ROOT), core=_core.__file__))
    found = run(
        f"""
        import torch
        import ortmodule
        import _xxsubinterpreters as interpreters

        interpreters.run_string(interpreters.create(isolated=False), {inner!r})
        """
    )
    assert "main interpreter" in found or "subinterpreters" in found


def test_text_has_memory_of_its_own():
    """A plan is as large after a thousand texts as before."""
    from tests.ops.cases import FAMILIES
    from tests.ops.harness import Trial

    plan = Trial(FAMILIES["matmul"][0], "float32").plan(True)
    before, text = plan.host_bytes, plan.text()
    assert "MatMul" in text
    assert all(plan.text() == text for _ in range(1000))
    assert plan.host_bytes == before


def test_model_is_published_whole():
    """Threads that ask a model for its inputs while it is read get an exception or all of them."""
    import threading

    from onnx import TensorProto, helper

    from ortmodule import _core

    names = [f"x{i}" for i in range(2000)]
    nodes = [helper.make_node("Relu", [name], [f"y{name}"]) for name in names]
    of = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "wide",
        [of(name, TensorProto.FLOAT, [None]) for name in names],
        [of(f"y{name}", TensorProto.FLOAT, [None]) for name in names],
    )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    for _ in range(20):
        model, wrong, stop = _core.Model.__new__(_core.Model), [], threading.Event()

        def ask(model=model, wrong=wrong, stop=stop):
            while not stop.is_set():
                try:
                    if model.inputs != names or len(model.outputs) != len(names):
                        wrong.append("inputs")
                except RuntimeError as error:
                    if "never read" not in str(error):
                        wrong.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        model.__init__(data)
        stop.set()
        thread.join()
        assert not wrong
