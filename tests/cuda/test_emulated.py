"""The CUDA backend on an emulated GPU: the driver of fake_driver.c, the kernels as C (emulate.h).

The tests need a build with it, and run only there:

    EMULATED=1 python setup.py -q build --build-lib build/emulated
    ORTMODULE_BUILD=build/emulated python -m pytest tests/cuda tests/ops
"""

import copy
import ctypes
import os
import subprocess
import sys
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from ortmodule.engine.session import Session
from tests.cuda.failing_calls import FailingCalls

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("error:.*PyTorch runs:UserWarning"),
]


def library(name):
    return ctypes.CDLL(str(Path(_core.__file__).parent / name))


@pytest.fixture
def driver():
    """The emulated driver; what it found wrong in a test fails the test."""
    fake = library("libcuda.so.1")
    fake.fake_complaint.restype = ctypes.c_char_p
    fake.fake_fail_at(0)
    yield fake
    fake.fake_fail_at(0)
    assert fake.fake_complaint() == b""


def session(rows, inputs, output):
    """A model of rows ("Op", "operands", "result", {attributes}) over inputs {name: (type, rank)}."""
    kinds = {"float32": onnx.TensorProto.FLOAT, "int64": onnx.TensorProto.INT64}

    def info(name, kind, rank):
        return onnx.helper.make_tensor_value_info(name, kinds[kind], [f"{name}_{d}" for d in range(rank)])

    nodes = [onnx.helper.make_node(op, ins.split(), outs.split(), **attrs) for op, ins, outs, attrs in rows]
    graph = onnx.helper.make_graph(nodes, "g", [info(n, k, r) for n, (k, r) in inputs.items()], [info(*output)])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=8)
    return Session(made.SerializeToString())


def gpt2(**settings):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61, "n_positions": 32}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **settings)).train()


DRY = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}


def test_training_step_is_pytorchs(driver):
    model = gpt2(**DRY)
    expected = copy.deepcopy(model)
    wrapped = ORTModule(model)
    tokens = torch.randint(0, 61, (2, 11))
    driver.fake_fail_at(0)
    losses = []
    for each in (wrapped, expected):
        loss = each(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
    assert driver.fake_calls() > 100, "the step did not run on the emulated GPU"
    torch.testing.assert_close(*losses)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_autocast_step_is_pytorchs(driver):
    model = gpt2(**DRY)
    expected = copy.deepcopy(model)
    wrapped = ORTModule(model)
    tokens = torch.randint(0, 61, (2, 11))
    driver.fake_fail_at(0)
    for each in (wrapped, expected):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(tokens, labels=tokens).loss
        loss.backward()
    assert driver.fake_calls() > 100
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        size = theirs.grad.abs().max().item()
        assert (ours.grad - theirs.grad).abs().max().item() <= 0.05 * size + 1e-4, name


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1023, 1025, 5000])
def test_dropout_has_the_bits_of_the_cpu(driver, count):
    """The same seed, node and place: the same mask, on the CPU's kernel and on the emulated GPU's."""
    nodes = [
        ("Constant", "", "ratio", {"value_float": 0.3}),
        ("Constant", "", "one", {"value_float": 1.0}),
        ("Cast", "one", "mode", {"to": onnx.TensorProto.BOOL}),
        ("Dropout", "x ratio mode", "y", {}),
    ]
    s = session(nodes, {"x": ("float32", 1)}, ("y", "float32", 1))
    x = torch.arange(1, count + 1, dtype=torch.float32)
    there = s.run([x], [False], seed=12345678901234567).outputs[0]
    plan = s.model.plan([("float32", (count,))], [False])
    here = torch.empty(count)
    arena = torch.empty(plan.arena_bytes + 64, dtype=torch.uint8)
    arena = arena[-arena.data_ptr() % 64 :]
    plan.forward(arena, [x], [here], [], 12345678901234567)
    assert torch.equal(there, here)
    assert count < 64 or 0 < (there == 0).sum() < count


def test_bad_index_is_an_error(driver):
    s = session([("Gather", "x i", "y", {})], {"x": ("float32", 2), "i": ("int64", 1)}, ("y", "float32", 2))
    x = torch.randn(5, 3)
    sentence = r"index 7 is out of range for an axis of size 5\n.*running Gather \(Gather_0\)"
    with pytest.raises(_core.Error, match=sentence):
        s.run([x, torch.tensor([1, 7])], [False, False])
    assert torch.equal(s.run([x, torch.tensor([4, -5])], [False, False]).outputs[0], x[[4, 0]])


def test_late_errors_name_their_node(driver):
    """What a kernel reports goes by number: the sentence has the operator and the name of the node, whichever it is."""
    nodes = [("Gather", "x i", "t", {}), ("Gather", "x j", "u", {}), ("Sub", "t u", "y", {})]
    inputs = {"x": ("float32", 2), "i": ("int64", 1), "j": ("int64", 1)}
    x, good, bad = torch.randn(5, 3), torch.tensor([1, 2]), torch.tensor([1, 9])
    for places, name in (((bad, good), "Gather_0"), ((good, bad), "Gather_1")):
        s = session(nodes, inputs, ("y", "float32", 2))
        with pytest.raises(_core.Error, match=rf"index 9 is out of range .*\n.*running Gather \({name}\)"):
            s.run([x, *places], [False] * 3)
    zero = [("Add", "a b", "s", {}), ("Div", "a b", "q", {}), ("Add", "q s", "y", {})]
    s = session(zero, {"a": ("int64", 1), "b": ("int64", 1)}, ("y", "int64", 1))
    with pytest.raises(_core.Error, match=r"ZeroDivisionError: a divisor is 0\n.*running Div \(Div_1\)"):
        s.run([torch.arange(5), torch.arange(5)], [False] * 2)


def test_every_call_may_fail(driver):
    """A failure is an exception that names the call, nothing is held that was not before, and the next run is right."""
    nodes = [("MatMul", "x w", "t", {}), ("Softmax", "t", "y", {"axis": -1})]
    inputs = {"x": ("float32", 2), "w": ("float32", 2)}
    x, w = torch.randn(9, 17), torch.randn(17, 5)
    dy = torch.randn(9, 5)
    session(nodes, inputs, ("y", "float32", 2)).run([x, w], [True, True], [True]).backward([dy])
    calls, held = FailingCalls(driver), driver.fake_held()
    for attempt in calls:
        s = session(nodes, inputs, ("y", "float32", 2))
        with attempt:
            run = s.run([x, w], [True, True], [True])
            run.backward([dy])
        if attempt.reached:
            assert attempt.error and driver.fake_held() == held
    assert calls.failures >= 6
    run = s.run([x, w], [True, True], [True])
    torch.testing.assert_close(run.outputs[0], (x @ w).softmax(-1))


def test_opening_may_fail(tmp_path):
    """In a process of its own: every call on the way to the first run fails in turn, and leaves nothing behind."""
    program = """
import ctypes, sys
from pathlib import Path
import torch
from ortmodule import _core
sys.path.append(sys.argv[1])
from tests.cuda.test_emulated import session
fake = ctypes.CDLL(str(Path(_core.__file__).parent / "libcuda.so.1"))
x = torch.randn(3, 4)
for n in range(1, 100):
    s = session([("Softmax", "x", "y", {"axis": -1})], {"x": ("float32", 2)}, ("y", "float32", 2))
    fake.fake_fail_at(n)
    try:
        s.run([x], [False])
    except (_core.Error, MemoryError) as error:
        assert "CUDA error 2" in str(error), error
    else:
        break
    held = fake.fake_held()
    assert held in (0, 1, 3), held  # the library stays once it is loaded; a device is opened whole or not at all
torch.testing.assert_close(s.run([x], [False]).outputs[0], x.softmax(-1))
assert n > 8 and fake.fake_held() == 3, (n, fake.fake_held())
print("passed")
"""
    root = Path(__file__).resolve().parents[2]
    path = str(Path(_core.__file__).resolve().parents[1])
    command = [sys.executable, "-c", program, str(root)]
    environment = {**os.environ, "PYTHONPATH": path, "ORTMODULE_BUILD": ""}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip().endswith("passed"), done.stderr


def test_operator_without_a_kernel_is_refused():
    s = session(
        [("Conv", "x w", "y", {"pads": [1, 2]})],
        {"x": ("float32", 3), "w": ("float32", 3)},
        ("y", "float32", 3),
    )
    with pytest.raises(_core.Error, match="Conv of this window has no CUDA kernel"):
        s.run([torch.randn(1, 2, 5), torch.randn(2, 2, 4)], [False, False])


class Multiplied(nn.Module):
    """What a GPU has kernels for around an operator that it has none for: padding that differs between the sides."""

    def __init__(self):
        super().__init__()
        self.linear, self.window = nn.Linear(4, 5), nn.Conv1d(1, 1, 4, padding="same")

    def forward(self, x):
        return torch.tanh(self.window(self.linear(x)[:, None])[:, 0] * 2)


def test_operator_without_a_kernel_is_pytorchs(driver):
    """PyTorch runs it as a node of the graph, on the run's stream and memory; the rest stays with the engine."""
    torch.manual_seed(0)
    model = Multiplied()
    expected, wrapped, x = copy.deepcopy(model), ORTModule(model), torch.randn(3, 4)
    for _ in range(2):
        driver.fake_fail_at(0)
        y, target = wrapped(x), expected(x)
        y.sum().backward()
        target.sum().backward()
        assert driver.fake_calls() > 5
        torch.testing.assert_close(y, target)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_copies_for_pytorchs_nodes_may_fail(driver):
    """Each call of a forward with such a node fails in turn: out of memory or PyTorch's result; nothing is held."""
    model, x = ORTModule(Multiplied()), torch.randn(3, 4)
    target = model(x).detach()
    held = driver.fake_held()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in FailingCalls(driver):
            with attempt:
                torch.testing.assert_close(model(x), target)
            assert driver.fake_held() == held
    assert attempt.n > 6
