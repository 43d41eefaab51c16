"""Triton kernels on the emulated GPU: C's side of their launch, with kernels that Triton's interpreter runs.

The image that the maker gives to the engine names a function of this file, which the emulated driver calls with the
kernel's parameters as they were handed over.
"""

import ctypes
import json

import numpy as np
import pytest
import torch

from ortmodule import _core
from ortmodule.core.errors import TritonError
from ortmodule.engine import autotune
from ortmodule.engine.session import Session
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
ROWS = [
    ("Mul", "x w", "scaled", {}),
    ("Softmax", "scaled", "s", {"axis": -1}),
    ("ReduceMean", "s", "m", {"axes": [-1], "keepdims": 1}),
    ("Sub", "s m", "y", {}),
]


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return pytest.importorskip("triton", reason="the package triton (641 MB) is not installed")


#: Kernels stay for the life of the process.
KEPT = []
#: That of the test that runs.
CURRENT = []


class Called:
    """A maker whose kernels are functions of this process; ``launches``: (blocks, threads, shared) of each."""

    def __init__(self):
        from ortmodule.triton_kernels.maker import Maker

        self.interpret, self.launches, self.made = Maker().interpret, [], []
        self.fastest = self.refused = None  # ways of kernels, where tuning measures them
        self.spend = lambda milliseconds: None

    def ways(self, program, how, width):
        from ortmodule.triton_kernels.maker import ways_of

        return ways_of(program, width)

    def compile(self, program, how, rows, width, architecture, way):
        from ortmodule.triton_kernels import interpreted, maker

        if way and way == self.refused:
            return None
        job = maker.job_of(program, how, width, way)
        types = {kind: name for name, kind in (("float32", "*fp32"), ("int64", "*i64"), ("bfloat16", "*bf16"))}
        self.made.append((program, how, architecture))

        def run(blocks, threads, shared, parameters):
            current = CURRENT[0]
            given = [
                interpreted.tensor_at(parameters[i], types[kind], 1) if kind[0] == "*" else
                ctypes.c_int64(parameters[i]).value
                for i, kind in enumerate(job.arguments.values())
            ]  # fmt: skip
            assert parameters[len(given)] == parameters[len(given) + 1] == 0, "Triton's own pointers are none"
            current.launches.append((blocks, threads, shared))
            current.spend(1 if way == current.fastest else 2)
            with np.errstate(all="ignore"):
                job.function[(blocks,)](*given, **job.constants)
            return 1

        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64)
        )
        KEPT.append(kind(run))
        address = ctypes.cast(KEPT[-1], ctypes.c_void_p).value
        image = f"callback {address:x} {len(job.arguments) + 2}\0".encode()
        return image, "chain", 32 * job.warps, job.block, 50 << 10, 2


@pytest.fixture
def maker(driver, triton, monkeypatch):  # noqa: F811
    from ortmodule.triton_kernels import maker as module

    called = Called()
    driver.fake_spend.argtypes, called.spend = [ctypes.c_double], driver.fake_spend
    CURRENT[:] = [called]
    monkeypatch.setattr(module, "install", lambda: _core.triton_maker(called, False))
    monkeypatch.setattr(module, "refusal", lambda gpu: "")
    return called


def with_one_more(op):
    """ROWS with an operator that no other test has, so that the kernels are new."""
    return [*ROWS[:-1], ("Sub", "s m", "z", {}), (op, "z", "y", {})]


def made(rows=ROWS, shapes=(("x", 3), ("w", 1)), graphs=False, tuning=None):
    import onnx

    from ortmodule.triton_kernels.rules import all_rules
    from ortmodule.triton_kernels.use import TritonUse

    def info(name, rank):
        return onnx.helper.make_tensor_value_info(name, 1, [f"{name}{d}" for d in range(rank)])

    nodes = [onnx.helper.make_node(op, ins.split(), outs.split(), **attrs) for op, ins, outs, attrs in rows]
    graph = onnx.helper.make_graph(nodes, "g", [info(*shape) for shape in shapes], [info("y", 3)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    return Session(model.SerializeToString(), graphs=graphs, tuning=tuning, triton=TritonUse(all_rules(), False))


def expected(x, w, dy, then=lambda y: y):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    s = torch.softmax(x * w, -1)
    y = then(s - s.mean(-1, keepdim=True))
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def run(session, x, w, dy):
    run = session.run([x, w], [True, True], [True])
    return [*run.outputs, *run.backward([dy])]


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_kernel_is_launched(maker, rows):
    """Results and gradients; the arguments arrive as the source has them, and the shared memory is asked for."""
    x, w, dy = torch.randn(2, rows, 48), torch.randn(48), torch.randn(2, rows, 48)
    session = made()
    for ours, theirs in zip(run(session, x, w, dy), expected(x, w, dy), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(maker.launches) == 2 and maker.launches[0][2] == 50 << 10


def test_a_kernel_is_made_once(maker):
    """Of one program for any number of rows; a mean's gradient has the width as a constant of its own."""
    session = made(with_one_more("Sinh"))
    for rows, width in ((3, 48), (7, 48), (2, 48), (3, 80)):
        x, w, dy = torch.randn(2, rows, width), torch.randn(width), torch.randn(2, rows, width)
        for ours, theirs in zip(run(session, x, w, dy), expected(x, w, dy, torch.sinh), strict=True):
            torch.testing.assert_close(ours, theirs)
    programs = [program for program, _, _ in maker.made]
    assert len(set(programs)) <= 4 and len(programs) < 8


def test_a_moved_operand_has_a_kernel_of_its_own(maker):
    """An address that is less aligned than the plan could hope is found in the run."""
    session = made(with_one_more("Atan"))
    for moved in (0, 1):
        x, w, dy = torch.randn(2 * 5 * 48 + moved)[moved:].view(2, 5, 48), torch.randn(48), torch.randn(2, 5, 48)
        for ours, theirs in zip(run(session, x, w, dy), expected(x, w, dy, torch.atan), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert {how.endswith("a") for _, how, _ in maker.made} == {True, False}


def test_what_triton_refuses_the_engine_computes(maker, monkeypatch):
    def refuse(*given):
        raise TritonError("Triton makes no kernel for sm_90: it is tired")

    monkeypatch.setattr(maker, "compile", refuse, raising=False)
    x, w, dy = torch.randn(2, 9, 37), torch.randn(37), torch.randn(2, 9, 37)
    session = made([("Exp", "x", "e", {}), *ROWS[:1], ("Sub", "scaled e", "d", {}), ("Asinh", "d", "y", {})])
    with pytest.warns(UserWarning, match="it is tired; the engine's own kernels run instead"):
        ours = run(session, x, w, dy)
    torch.testing.assert_close(ours[0], (x * w - x.exp()).asinh())


def test_a_cuda_graph_replays_kernels(maker):
    """Recorded at the second run on the same memory; a kernel's arguments are those of its recording."""
    session = made(with_one_more("Cosh"), graphs=True)
    x, w, dy = torch.randn(2, 6, 48), torch.randn(48), torch.randn(2, 6, 48)
    for _ in range(4):
        x.uniform_(-1, 1)
        for ours, theirs in zip(run(session, x, w, dy), expected(x, w, dy, torch.cosh), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(maker.launches) == 8


# --- tuning -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def untuned():
    _core.tuning_clear()
    autotune._measured.clear()
    yield
    _core.tuning_clear()
    autotune._measured.clear()


def test_the_fastest_cut_is_taken_kept_and_read_again(maker, untuned, tmp_path):
    """Kernels of rows of 48 elements have five cuts, one of which Triton refuses here."""
    from ortmodule.triton_kernels.maker import ways_of

    first, *others = ways_of("rows\n", 48)
    maker.fastest, maker.refused = others[1], others[2]
    assert len(others) >= 3 and first == "64x8x1"
    file, rows = tmp_path / "results.json", with_one_more("Tan")
    x, w, dy = torch.randn(2, 6, 48), torch.randn(48), torch.randn(2, 6, 48)

    def values(session):
        return run(session, x, w, dy)

    tuned = made(rows, tuning=autotune.Tuning(True, 50, str(file)))
    ours = values(tuned)
    products = autotune._here(json.loads(file.read_text()), _core.cuda_place(0))["products"]
    cuts = {text: entry for text, entry in products.items() if text.startswith("triton ")}
    assert len(cuts) == 2  # forward and backward
    for entry in cuts.values():
        assert entry["way"] == maker.fastest and entry["seconds"].keys() == {first, *others} - {maker.refused}
    threads = 32 * int(maker.fastest.split("x")[1])
    assert {launch[1] for launch in maker.launches[-2:]} == {threads}
    again = values(made(rows, tuning=autotune.Tuning(True, 50, str(file))))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert tuned.tuning.products == 2 + len(products) - len(cuts)


def test_a_cut_of_the_file_that_is_none_is_left_out(maker, untuned):
    """The kernel is cut as where nothing was measured."""
    session = made(with_one_more("Atanh"))
    x, w, dy = torch.randn(2, 5, 48), torch.randn(48), torch.randn(2, 5, 48)
    with pytest.raises(ValueError, match="no product"):
        _core.cuda_tuning_set(0, "triton" + "x" * 300, "64x8x1")
    for ours, theirs in zip(run(session, x, w, dy), expected(x, w, dy, torch.atanh), strict=True):
        torch.testing.assert_close(ours, theirs)
