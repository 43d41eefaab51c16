"""Products by cuBLASLt (csrc/cuda/libraries/blas.c), on a library of ours that multiplies on the CPU (fake_blas.c)."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch

from ortmodule import _core
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.ops.harness import ONNX_TYPE, dtype_name
from tests.tolerances import OPERATOR, bounds

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(params=["library", "kernel"])
def blas(request, driver):  # noqa: F811
    """The library; it takes products, or refuses them all and the engine's kernel has to."""
    _core.tuning_clear()  # what was said against a product holds for as long as the product is known
    fake = library("libcublasLt.so.13")
    fake.fake_blas_refuse(request.param == "kernel")
    fake.takes = request.param == "library"
    yield fake
    fake.fake_blas_refuse(0)
    _core.tuning_clear()


def session(rows, operands):
    """A model of rows ("Op", "operands", {attributes}) over a, b, ...; the last result is y."""
    from ortmodule.engine.session import Session

    names = "abcdef"[: len(operands)]
    inputs = [
        onnx.helper.make_tensor_value_info(n, ONNX_TYPE[t.dtype], [f"{n}{d}" for d in range(t.dim())])
        for n, t in zip(names, operands, strict=True)
    ]
    nodes = []
    for i, (op, used, attributes) in enumerate(rows):
        domain, _, op = op.rpartition("::")
        result = "y" if i == len(rows) - 1 else f"t{i}"
        nodes.append(onnx.helper.make_node(op, used.split(), [result], domain=domain, **attributes))
    y = onnx.helper.make_tensor_value_info("y", ONNX_TYPE[operands[0].dtype], None)
    graph = onnx.helper.make_graph(nodes, "g", inputs, [y])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("ortmodule", 1)]
    return Session(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def compare(rows, operands, expected, dy=True):
    """The engine's result and gradients are those of ``expected``, computed in float64. Returns the session."""
    s = session(rows, operands)
    wide = [t.double().requires_grad_(dy) for t in operands]
    y = expected(*wide)
    run = s.run(operands, [dy] * len(operands), [True] if dy else None)
    kind = operands[0].dtype

    def close(ours, theirs):
        off = (ours.double() - theirs).abs()
        assert bool((off <= bounds(theirs, *OPERATOR[kind], most=math.inf)).all()), f"off by {off.max():.3g}"

    close(run.outputs[0], y.detach())
    if not dy:
        return s
    upstream = torch.randn(y.shape, dtype=torch.float64).to(kind)
    grads = run.backward([upstream])
    for ours, theirs in zip(grads, torch.autograd.grad(y, wide, upstream.double()), strict=True):
        close(ours, theirs)
    return s


PLAIN = [("MatMul", "a b", {})]
SUM = [("Gemm", "a b c", {})]


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
@pytest.mark.parametrize(
    "left, right",
    [
        ((3, 4), (4, 5)),
        ((1, 7), (7, 1)),
        ((65, 33), (33, 129)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 5, 4), (2, 3, 4, 6)),
        ((2, 1, 5, 4), (3, 4, 6)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4,)),
    ],
)
def test_product(blas, kind, left, right):
    torch.manual_seed(0)
    before = blas.fake_blas_products()
    compare(PLAIN, [torch.randn(left).to(kind), torch.randn(right).to(kind)], torch.matmul)
    assert (blas.fake_blas_products() - before >= 3) == blas.takes


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
@pytest.mark.parametrize(
    "left, right, added",
    [
        ((5, 4), (4, 6), (6,)),
        ((5, 4), (4, 6), (5, 6)),
        ((5, 4), (4, 6), (5, 1)),
        ((5, 4), (4, 6), ()),
        ((2, 5, 4), (4, 6), (6,)),
        ((2, 5, 4), (2, 4, 6), (6,)),
        ((2, 5, 4), (2, 4, 6), (2, 5, 6)),
        ((2, 5, 4), (2, 4, 6), (5, 6)),
        ((5, 4), (4,), (5,)),
        ((4,), (4, 6), (6,)),
    ],
)
def test_product_and_sum(blas, kind, left, right, added):
    torch.manual_seed(0)
    operands = [torch.randn(s).to(kind) for s in (left, right, added)]
    if len(left) == len(right) == 2 and len(added) > 0:
        compare([("Gemm", "a b c", {"alpha": 0.5})], operands, lambda a, b, c: 0.5 * (a @ b) + c)
    compare([*PLAIN, ("Add", "t0 c", {})], operands, lambda a, b, c: a @ b + c)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_transposed_and_sliced_operands(blas, kind):
    """Heads of an attention: products where they lie, through strides."""
    torch.manual_seed(0)
    rows = [
        ("Transpose", "a", {"perm": [0, 2, 1, 3]}),
        ("Transpose", "b", {"perm": [0, 2, 3, 1]}),
        ("MatMul", "t0 t1", {}),
    ]
    before = blas.fake_blas_products()
    operands = [torch.randn(2, 5, 3, 4).to(kind), torch.randn(2, 6, 3, 4).to(kind)]
    compare(rows, operands, lambda a, b: a.transpose(1, 2) @ b.permute(0, 2, 3, 1))
    assert (blas.fake_blas_products() > before) == blas.takes


def test_a_workspace_behind_a_larger_value(driver):  # noqa: F811
    """Whose size is no multiple of 256 bytes. Most values are smaller: the workspace lies where memory begins."""
    torch.manual_seed(0)
    before = library("libcublasLt.so.13").fake_blas_products()
    operands = [torch.randn(259, 1031), torch.randn(1031, 3)]  # 1,068,116 bytes, and a workspace of 274,688
    rows = [("Softmax", "a", {}), ("MatMul", "t0 b", {})]
    compare(rows, operands, lambda a, b: a.softmax(-1) @ b, dy=False)
    assert library("libcublasLt.so.13").fake_blas_products() - before == 1


def test_nothing_to_sum(blas):
    """No inner elements: zeros, or what is added."""
    a, b, c = torch.randn(3, 0), torch.randn(0, 4), torch.randn(4)
    compare(PLAIN, [a, b], torch.matmul, dy=False)
    compare(SUM, [a, b, c], lambda a, b, c: a @ b + c, dy=False)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_operands_of_any_alignment(blas, offset):
    torch.manual_seed(0)
    a = torch.randn(5 * 4 + offset)[offset:].view(5, 4)
    b = torch.randn(4 * 6 + offset)[offset:].view(4, 6)
    compare(PLAIN, [a, b], torch.matmul)


def test_every_call_may_fail_while_a_product_is_described(driver):  # noqa: F811
    """Sizes that are new each time, so that each attempt describes a product."""
    calls, held = FailingCalls(driver), driver.fake_held()
    for attempt in calls:
        n = attempt.n
        a, b, c = torch.randn(3, n + 1), torch.randn(n + 1, 4), torch.randn(4)
        s = session(SUM, [a, b, c])
        with attempt:
            run = s.run([a, b, c], [False] * 3)
        if not attempt.reached:
            break
        assert attempt.error
        # A product that is described stays, should a later call fail: its description and three layouts.
        assert driver.fake_held() in (held, held + 4), n
        held = driver.fake_held()
        torch.testing.assert_close(s.run([a, b, c], [False] * 3).outputs[0], a @ b + c)
        held = driver.fake_held()
    torch.testing.assert_close(run.outputs[0], a @ b + c)
    assert calls.failures > 15


def test_products_are_forgotten_when_there_are_many(driver):  # noqa: F811
    """What is held for products stays bounded, and what comes after is right."""
    before, most = driver.fake_held(), 0
    for n in range(1, 1100):
        a, b = torch.randn(1, 2), torch.randn(2, n)
        y = session(PLAIN, [a, b]).run([a, b], [False] * 2).outputs[0]
        most = max(most, driver.fake_held())
    torch.testing.assert_close(y, a @ b)
    assert most - before < 4 * 1024 + 16


def test_heuristic_without_an_answer(driver):  # noqa: F811
    """Our own kernel multiplies what the library has no algorithm for."""
    fake = library("libcublasLt.so.13")
    a, b = torch.randn(37, 41), torch.randn(41, 43)
    fake.fake_blas_refuse(2)
    try:
        s = session(PLAIN, [a, b])
        before = fake.fake_blas_products()
        torch.testing.assert_close(s.run([a, b], [False] * 2).outputs[0], a @ b)
    finally:
        fake.fake_blas_refuse(0)
    assert fake.fake_blas_products() == before


def said_without(tmp_path, name, poor, module, shape):
    """What a process prints that runs a module where the library ``name`` is missing, or has the C text ``poor``, which
    may call the emulated driver."""
    package = Path(_core.__file__).resolve().parent
    copy = tmp_path / "ortmodule"
    shutil.copytree(package, copy)
    (copy / name).unlink()
    if poor:
        (tmp_path / "poor.c").write_text(poor)
        driver = [copy / "libcuda.so.1"] if name != "libcuda.so.1" else []
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", copy / name, tmp_path / "poor.c", *driver], check=True)
    program = f"""
import warnings, torch
from ortmodule import ORTModule
model = {module}
x = torch.randn({shape})
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    y = ORTModule(model)(x)
torch.testing.assert_close(y, model(x))
print("".join(str(w.message) for w in seen))
"""
    places = {"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(copy)}  # sanitizers know no rpath
    environment = {**os.environ, **places, "ORTMODULE_BUILD": "", "ORTMODULE_LOG_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_no_library(tmp_path):
    """Without cuBLASLt: a sentence that names it, and the module runs in PyTorch."""
    said = said_without(tmp_path, "libcublasLt.so.13", "", "torch.nn.Linear(3, 2)", "4, 3")
    assert "there is no cuBLASLt: libcublasLt.so.13 was not found" in said


def test_an_old_library(tmp_path):
    poor = "int cublasLtCreate(void **out) { return !out; }"
    said = said_without(tmp_path, "libcublasLt.so.13", poor, "torch.nn.Linear(3, 2)", "4, 3")
    assert "the cuBLASLt is too old: libcublasLt.so.13 has no cublasLtDestroy" in said


def test_tf32_is_torchs_setting(blas):
    """In forward and backward, as the setting is when they run; never for float64."""
    setting, before = torch.backends.cuda.matmul, blas.fake_blas_rounded()
    now = setting.fp32_precision
    operands = [torch.randn(3, 4), torch.randn(4, 5)]
    try:
        for precision, rounded in (("ieee", 0), ("tf32", 3)):
            setting.fp32_precision = precision
            compare(PLAIN, operands, torch.matmul)
            compare(PLAIN, [t.double() for t in operands], torch.matmul)
            assert blas.fake_blas_rounded() - before == (rounded if blas.takes else 0)
    finally:
        setting.fp32_precision = now


def test_library_is_loaded_once(blas):
    assert ctypes.CDLL(str(Path(_core.__file__).parent / "libcublasLt.so.13"))._handle == blas._handle


MET = [("MatMul", "a b", {}), ("MatMul", "a c", {}), ("Tanh", "t0", {}), ("Add", "t2 t1", {})]


@pytest.mark.parametrize("kind", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("sizes", [((5, 7), (7, 9)), ((2, 3, 16), (16, 8)), ((1, 6), (6, 4))], ids=str)
def test_gradients_that_meet(blas, kind, sizes):
    """That of ``a`` is a sum of two products: the second is added to the first, where it lies."""
    torch.manual_seed(0)
    operands = [torch.randn(sizes[i]).to(kind) for i in (0, 1, 1)]
    s = compare(MET, operands, lambda a, b, c: (a @ b).tanh() + a @ c)
    assert any("MatMulAdd(" in plan.text() for plan in s.plans.values())
