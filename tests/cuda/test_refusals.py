"""What NVIDIA's libraries refuse when they are started something slower does, with the same result (refusals.c).

The library is not asked for it again, and the user is told once.
"""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, Report, _core, explain
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_epilogues import EVERY, Fixed, layers
from tests.cuda.test_products import PLAIN, SUM, session

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")

INVALID_VALUE, ARCH_MISMATCH, EXECUTION_FAILED, INTERNAL_ERROR, NOT_SUPPORTED = 7, 8, 13, 14, 15
#: What cublasLtMatmul returns, and its name.
STATUSES = {
    INVALID_VALUE: "INVALID_VALUE",
    ARCH_MISMATCH: "ARCH_MISMATCH",
    EXECUTION_FAILED: "EXECUTION_FAILED",
    INTERNAL_ERROR: "INTERNAL_ERROR",
    NOT_SUPPORTED: "NOT_SUPPORTED",
}


def refusals():
    return (_core.cuda_refusals(-1) or (0, []))[0]


@pytest.fixture
def blas(driver):  # noqa: F811
    """The library, which knows no product of an earlier test."""
    _core.tuning_clear()
    fake = library("libcublasLt.so.13")
    yield fake
    fake.fake_blas_fail(0, 0)
    _core.tuning_clear()


@pytest.fixture
def dnn(driver):  # noqa: F811
    fake = library("libcudnn.so.9")
    yield fake
    fake.fake_dnn_fail(0, 0)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("rows", [PLAIN, SUM])
def test_a_product_is_refused(blas, status, rows):
    """A sum's is refused twice: with what is added as the epilogue's vector, then as a matrix."""
    operands = [torch.randn(5, 7), torch.randn(7, 9), torch.randn(9)][: 2 + (rows is SUM)]
    expected = torch.addmm(operands[2], *operands[:2]) if rows is SUM else operands[0] @ operands[1]
    s, before, seen = session(rows, operands), blas.fake_blas_products(), refusals()
    for n in range(1 + (rows is SUM)):
        blas.fake_blas_fail(1, status)
        torch.testing.assert_close(s.run(operands, [False] * len(operands)).outputs[0], expected)
        assert refusals() == seen + n + 1
    computed = blas.fake_blas_products()
    assert computed - before == (rows is SUM), "the kernel of ours multiplies what was refused as a whole"
    torch.testing.assert_close(s.run(operands, [False] * len(operands)).outputs[0], expected)
    assert blas.fake_blas_products() == computed and refusals() == seen + 1 + (rows is SUM)


@pytest.mark.parametrize("status", [INVALID_VALUE, EXECUTION_FAILED])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_each_product_of_a_step_is_refused(blas, status, kind):
    """Of forward and backward in turn; with an epilogue, the product is computed without it."""
    rows, expected = layers(True, True, True)
    operands = [torch.randn(s).to(kind) for s in [(5, 6), (16, 6), (4, 16), (16,)]]
    wide = [t.double().requires_grad_() for t in operands]
    y = expected(*wide)
    upstream = torch.randn(y.shape)
    grads = torch.autograd.grad(y, wide, upstream.to(kind).double())
    exact = 1e-4 if kind == torch.float32 else 4e-2
    for n in range(1, 20):
        _core.tuning_clear()
        seen, s = refusals(), session(rows, operands)
        finished = sum(blas.fake_blas_finished(e) for e in EVERY)
        blas.fake_blas_fail(n, status)
        for _ in range(2):
            run = s.run(operands, [True] * 4, [True])
            torch.testing.assert_close(run.outputs[0].double(), y.detach(), rtol=exact, atol=exact)
            for ours, theirs in zip(run.backward([upstream.to(kind)]), grads, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=exact, atol=exact)
        if refusals() == seen:
            break
        assert refusals() == seen + 1
        assert sum(blas.fake_blas_finished(e) for e in EVERY) - finished >= 2, "other products keep their epilogues"
    assert n > 5


@pytest.mark.parametrize("how", [3, 4], ids=["when it is started", "by the heuristic"])
def test_epilogues_are_refused(blas, how):
    """As a library may that has none for a type: products without them are the library's all the same."""
    torch.manual_seed(0)
    model, x = net(), torch.randn(3, 6)
    expected = image_step(model, x)
    blas.fake_blas_refuse(how)
    try:
        wrapped = ORTModule(net())
        seen = refusals()
        with pytest.warns(UserWarning, match="CUBLAS_STATUS_NOT_SUPPORTED.*epilogue (36|164)"):
            found = image_step(wrapped, x)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        noted, products = refusals(), blas.fake_blas_products()
        image_step(wrapped, x)
        assert refusals() == noted >= seen + 3 and blas.fake_blas_products() - products >= 4
    finally:
        blas.fake_blas_refuse(0)


def test_the_second_of_several_products_is_refused(blas):
    """Matrices in two batch dimensions, which the library gets one by one: all are computed anew."""
    a, b = torch.randn(2, 1, 5, 4).expand(2, 3, 5, 4).contiguous(), torch.randn(2, 3, 4, 6).transpose(0, 1)
    rows = [("Transpose", "b", {"perm": [1, 0, 2, 3]}), ("MatMul", "a t0", {})]
    s, seen = session(rows, [a, b.contiguous()]), refusals()
    blas.fake_blas_fail(2, EXECUTION_FAILED)
    y = s.run([a, b.contiguous()], [False] * 2).outputs[0]
    torch.testing.assert_close(y, a @ b.transpose(0, 1))
    assert refusals() == seen + 1


@pytest.mark.parametrize("status", [INVALID_VALUE, EXECUTION_FAILED])
def test_a_refusal_while_a_graph_is_recorded(blas, status):
    """The step is recorded with what is computed instead, and goes on as a graph; at the next time, where a kernel that
    did not start has spoiled the recording."""
    rows, expected = layers(True, True, True)
    for n in range(1, 9):
        _core.tuning_clear()
        fixed = Fixed(rows, [torch.randn(s) for s in [(5, 6), (16, 6), (4, 16), (16,)]])
        wanted, seen = fixed.step(graphs=False), refusals()
        fixed.step()
        blas.fake_blas_fail(n, status)
        for _ in range(4):
            for ours, theirs in zip(fixed.step(), wanted, strict=True):
                torch.testing.assert_close(ours, theirs)
        if refusals() == seen:
            break
        assert fixed.plan.graphs[2] >= 3
    assert n > 5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 5))


def test_the_user_is_told_once(blas):
    """A warning, and a line in explain()."""
    model, x = ORTModule(net()), torch.randn(3, 6)
    model(x)
    assert explain(model).refused == []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in (1, 1, 0):
            blas.fake_blas_fail(n, INVALID_VALUE)
            torch.testing.assert_close(model(x), net()(x))
    told = [str(w.message) for w in said if "cuBLASLt" in str(w.message)]
    assert len(told) == 1 and "CUBLAS_STATUS_INVALID_VALUE" in told[0] and "float32 float32" in told[0]
    report = explain(model)
    assert len(report.refused) == 2 and str(report).count("refused    cuBLASLt error 7 in cublasLtMatmul") == 2
    assert explain(ORTModule(net())).refused == []


def test_a_heuristic_without_an_answer_is_told(blas):
    blas.fake_blas_refuse(2)
    try:
        model = ORTModule(net())
        with pytest.warns(UserWarning, match="cuBLASLt error 15 in cublasLtMatmulAlgoGetHeuristic"):
            torch.testing.assert_close(model(torch.ones(3, 6)), net()(torch.ones(3, 6)))
    finally:
        blas.fake_blas_refuse(0)
    assert explain(model).refused


def test_a_long_list_is_cut():
    report = Report("Linear", True, None, refused=[f"sentence {i}" for i in range(9)])
    assert "refused    sentence 2\n" in str(report) and "sentence 3" not in str(report)
    assert "refused    and 6 more" in str(report)


# --- NVRTC ------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x * 3 + x) * x - torch.tanh(x)


@pytest.mark.parametrize(
    "allowed, sentence", [(0, "NVRTC error 2 in nvrtcCreateProgram"), (2, "chain.cu.1.: error: a mistake")]
)
def test_a_chain_that_is_not_compiled(driver, allowed, sentence):  # noqa: F811
    library("libnvrtc.so.13").fake_nvrtc_allow(allowed)
    try:
        model, x = ORTModule(Chain()), torch.randn(4, 7)
        with pytest.warns(UserWarning, match=f"what NVRTC refused.*(\n.*)*{sentence}"):
            torch.testing.assert_close(model(x), Chain()(x))
    finally:
        library("libnvrtc.so.13").fake_nvrtc_allow(0)
    assert "a fused chain is interpreted" in str(explain(model))


COMPILER = """
#include <dlfcn.h>
int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return dlopen("libnvrtc-builtins.so.13.0", RTLD_LAZY) ? 0 : 7;
}
int nvrtcCreateProgram(void) { return 2; }
int nvrtcCompileProgram, nvrtcGetProgramLogSize, nvrtcGetProgramLog, nvrtcGetCUBINSize, nvrtcGetCUBIN;
int nvrtcDestroyProgram;
"""
PROGRAM = """
import ctypes, sys, torch
from ortmodule import ORTModule, _core
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
ORTModule(torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Tanh()))(torch.randn(2, 3))
print(_core.cuda_chains()["reason"])
"""


@pytest.mark.parametrize("has_builtins", [True, False])
def test_what_nvrtc_opens_lies_beside_it(tmp_path, has_builtins):
    """NVRTC is loaded from a folder beside another library of CUDA, which the loader does not look into."""
    package, beside, cuda = tmp_path / "ortmodule", tmp_path / "cuda_nvrtc/lib", tmp_path / "cuda_runtime/lib"
    shutil.copytree(Path(_core.__file__).parent, package, ignore=shutil.ignore_patterns("libnvrtc*", "__pycache__"))
    beside.mkdir(parents=True), cuda.mkdir(parents=True)
    made = {beside / "libnvrtc.so.13": COMPILER, cuda / "libcudart.so.13": ""}
    if has_builtins:
        made[beside / "libnvrtc-builtins.so.13.0"] = ""
    for path, text in made.items():
        (tmp_path / "text.c").write_text(text)
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, tmp_path / "text.c", "-ldl"]
        subprocess.run(command, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(package), "ORTMODULE_BUILD": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cuda / "libcudart.so.13"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"NVRTC error {'2 in nvrtcCreateProgram' if has_builtins else '7 in nvrtcVersion'}"


# --- cuDNN ------------------------------------------------------------------------------------------------------------

BAD_PARAM, UNSUPPORTED, NOT_STARTED = 2000, 3000, 5003


def image_step(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("status", [BAD_PARAM, UNSUPPORTED, NOT_STARTED])
def test_a_convolution_takes_the_next_algorithm(dnn, status):
    """Of forward, of the gradients; from then on it is the one that is used."""
    torch.manual_seed(0)
    for n in (1, 2, 3):
        model, x = nn.Conv2d(2, 11, 3, padding=n), torch.randn(2, 2, 7, 6 + n + status // 1000, requires_grad=True)
        wrapped, theirs = ORTModule(model), image_step(model, x)
        image_step(wrapped, x)
        seen, spare = refusals(), dnn.fake_dnn_spare()
        dnn.fake_dnn_fail(n, status)
        for i in range(2):
            for a, b in zip(image_step(wrapped, x), theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
            assert refusals() == seen + 1 and dnn.fake_dnn_spare() == spare + 1 + i


@pytest.mark.filterwarnings("ignore")
def test_a_convolution_that_no_algorithm_does_is_pytorchs(dnn):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 11, 3), nn.ReLU()), torch.randn(2, 2, 7, 13)
    wrapped, theirs = ORTModule(model), image_step(model, x)
    image_step(wrapped, x)
    seen = refusals()
    for _ in range(2):  # one algorithm, then the other
        dnn.fake_dnn_fail(1, UNSUPPORTED)
        for a, b in zip(image_step(wrapped, x), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert refusals() == seen + 2
    assert explain(wrapped).aten_ops == ["aten::_convolution"]


@pytest.mark.parametrize("status", [BAD_PARAM, NOT_STARTED])
def test_norms_and_pools_have_kernels_of_ours(dnn, status):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm2d(11), nn.AvgPool2d(2)), torch.randn(2, 11, 6, status // 500)
    wrapped, theirs = ORTModule(model), image_step(model, x)
    for n in (1, 2, 3):
        seen = refusals()
        dnn.fake_dnn_fail(n, status)
        for a, b in zip(image_step(wrapped, x), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        dnn.fake_dnn_fail(0, 0)
        assert refusals() <= seen + 1
    assert len(explain(wrapped).refused) >= 2
