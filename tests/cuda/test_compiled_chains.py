"""Chains are compiled at run time: our libnvrtc has the C compiler make kernels for the emulated GPU."""

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from ortmodule import _core
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_chains import chains, check_bits, model, step
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_products import session

pytestmark = pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nvrtc(driver):  # noqa: F811
    fake = library("libnvrtc.so.13")
    for name in ("text", "header", "name"):
        getattr(fake, f"fake_nvrtc_{name}").restype = ctypes.c_char_p
    fake.fake_nvrtc_allow(1)
    yield fake
    fake.fake_nvrtc_allow(0)
    _core.cuda_chains("")


def rows(*ops):
    """Each of x0 and what the one before made."""
    return [(op, f"v{i - 1} x0" if i else "x0 x0", f"v{i}", {}) for i, op in enumerate(ops)]


def check(chain, moved=0):
    """The same bits as operator by operator. `moved`: elements that operands begin after an aligned address."""
    dtype, shapes, *_ = chain
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    tensors = [torch.cat([x.new_zeros(moved), x.flatten()])[moved:].view(x.shape) for x in tensors]
    check_bits(model(*chain), tensors)


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(chain=chains())
def test_bits_are_those_of_single_operators(nvrtc, chain):
    before = _core.cuda_chains()
    check(chain)
    after = _core.cuda_chains()
    assert after["compiled"] > before["compiled"] or b"chain" in (nvrtc.fake_nvrtc_text() or b"")
    assert after["reason"] == before["reason"], "a chain that is not compiled is interpreted"


@pytest.mark.parametrize("moved", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_of_every_alignment(nvrtc, dtype, moved):
    """Rows, columns and one number among them, read in pieces; the last elements are no whole piece."""
    shapes = [(33, 72), (72,), (33, 1), (1,), (33, 72)]
    for rows_more in (0, 1):
        ops = [("Mul", "x0 x1", "v0", {}), ("Add", "v0 x2", "v1", {}), ("Sub", "v1 x3", "v2", {})]
        ops += [("Dropout", "v2 ratio mode", "v3", {}), ("Max", "v3 x4", "v4", {})]
        sizes = [(s[0] + rows_more, *s[1:]) if s[0] == 33 else s for s in shapes]
        check((dtype, sizes, ops, ["v1", "v4"]), moved)
    check((dtype, [(7, 5), (7, 5)], [("Add", "x0 x1", "v0", {}), ("Neg", "v0", "v1", {})], ["v1"]), moved)
    text = nvrtc.fake_nvrtc_text().decode()
    assert "IS_ALIGNED" in text


def test_text(nvrtc):
    check((torch.bfloat16, [(3, 37)], [*rows("Mul", "Sub"), ("Dropout", "v1 ratio mode", "v2", {})], ["v2"]))
    text = nvrtc.fake_nvrtc_text().decode()
    assert "KERNEL(chain, chain_args)" in text and "round_to_bf16(" in text and "kept_bits(seed" in text


def test_a_chain_is_compiled_once(nvrtc):
    chain = (torch.float32, [(5, 7)], rows("Add", "Mul", "Max", "Max"), ["v3"])
    check(chain)
    before = _core.cuda_chains()["compiled"]
    check(chain)
    check((torch.float32, [(9, 4)], *chain[2:]))
    assert _core.cuda_chains()["compiled"] == before


def many(n, first="Add"):
    """`n` different chains of a graph, kept apart by products of matrices."""
    ops, last = [], "x0"
    for i in range(n):
        for j, op in enumerate([first, *["Max", "Sub"] * (i // 4 + 1), *(["Mul", "Min", "Div"][: i % 4])]):
            ops.append((op, f"{last} x0", f"c{i}_{j}", {}))
            last = f"c{i}_{j}"
        ops.append(("MatMul", f"{last} x0", f"m{i}", {}))
        last = f"m{i}"
    return (torch.float32, [(6, 6)], ops, [last])


def test_chains_of_a_plan_are_compiled_together(driver, nvrtc):  # noqa: F811
    """By several threads at one time: each once, with the bits of single operators; a second plan compiles none."""
    before = _core.cuda_chains()
    nvrtc.fake_nvrtc_together()
    check(many(12))
    assert nvrtc.fake_nvrtc_together() >= min(os.cpu_count(), 2)
    after = _core.cuda_chains()
    assert after["compiled"] - before["compiled"] >= 12 and after["reason"] == before["reason"]
    check(many(12))
    assert _core.cuda_chains() == after
    assert not driver.fake_complaint()


def test_one_of_several_is_refused(driver, nvrtc):  # noqa: F811
    """It is interpreted, and compiled with the next plan; the others have their kernels."""
    for n, first in ((8, "Mul"), (9, "Min"), (10, "Div"), (11, "Max")):
        before = _core.cuda_chains()["compiled"]
        chain = many(4, first)
        alone, _ = step(model(*chain), [tensor := torch.rand(6, 6) + 1], ["pointwise_fusion"])
        driver.fake_fail_at(n)
        try:
            together, _ = step(model(*chain), [tensor], [])
        finally:
            driver.fake_fail_at(0)
        made = _core.cuda_chains()["compiled"] - before
        assert torch.equal(alone[0], together[0])
        check(chain)
        assert made > 2 and _core.cuda_chains()["compiled"] - before == made + 1
    assert not driver.fake_complaint()


def test_every_call_may_fail(driver, nvrtc):  # noqa: F811
    """Without a compiled kernel the interpreter runs; a failure of the driver is an error; nothing is held."""
    for attempt in FailingCalls(driver):
        n = attempt.n
        chain = (torch.float32, [(3, 5)], rows("Add", *["Sub"] * (n % 7 + 1), "Mul", "Min"), [f"v{n % 7 + 3}"])
        tensors = [torch.randn(3, 5)]
        alone, _ = step(model(*chain), tensors, ["pointwise_fusion"])
        kept = driver.fake_held()
        with attempt:
            together, _ = step(model(*chain), tensors, [])
            assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
        assert driver.fake_held() - kept in (0, 1, 2, 3)  # kernels that were loaded
    assert attempt.n > 8


def test_headers_are_where_kernels_include_them(nvrtc):
    """Nothing was compiled in vain so far: another order of tests would hide it behind the one below."""
    check((torch.float32, [(2, 3)], rows("Mul", "Sub", "Mul", "Max", "Min"), ["v4"]))
    assert _core.cuda_chains()["compiled"] > 0


def single(op, operands, attributes, dtype):
    """The result of one operator, and its gradient where it has one operand, from a session of its own."""
    operands = [x.to(dtype) for x in operands]
    made, backward = session([(op, " ".join("abc"[: len(operands)]), attributes)], operands), len(operands) == 1
    run = made.run(operands, [backward] * len(operands), [True] if backward else None)
    return [run.outputs[0], *(run.backward([operands[0] / 2]) if backward else [])]


#: Of more elements than single operators need for a kernel of their own, which are no whole pieces at the end.
MANY = (1025, 1027)


ONE_OPERATOR = [("Gelu", [MANY], torch.bfloat16), ("Mul", [MANY, (MANY[1],)], torch.float32)]
ONE_OPERATOR += [("Max", [MANY, (MANY[0], 1)], torch.float16)]


@pytest.mark.parametrize(("op", "shapes", "dtype"), ONE_OPERATOR, ids=str)
def test_one_operator_of_many_elements(nvrtc, op, shapes, dtype):
    """Compiled as a chain of one step, it has the bits of the kernel that is there without a compiler."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[0][0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    nvrtc.fake_nvrtc_allow(0)
    expected = single(op, tensors, {}, dtype)
    nvrtc.fake_nvrtc_allow(1)
    before = _core.cuda_chains()["compiled"]
    results = single(op, tensors, {}, dtype)
    assert _core.cuda_chains()["compiled"] > before
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


def test_a_mistake_is_told(nvrtc):
    nvrtc.fake_nvrtc_allow(2)
    check((torch.float64, [(3, 5)], rows("Add", "Div", "Div", "Min"), ["v3"]))
    assert "NVRTC does not compile a chain: chain.cu(1): error: a mistake" in _core.cuda_chains()["reason"]


#: Imports once, which takes seconds; each line asks for a chain that is run in a process of its own, forked from there.
PROGRAM = """
import ctypes, json, os, sys
from pathlib import Path
import torch
from ortmodule import _core
sys.path.append(sys.argv[1])
from tests.cuda.test_compiled_chains import check, rows
there = Path(_core.__file__).parent / "libnvrtc.so.13"
for line in sys.stdin:
    if (child := os.fork()) == 0:
        cwd, folder = json.loads(line)
        os.chdir(cwd)
        if there.exists():
            ctypes.CDLL(str(there)).fake_nvrtc_allow(1)
        _core.cuda_chains(folder)
        check((torch.float32, [(5, 7)], rows("Add", "Mul", "Max"), ["v2"]))
        print(json.dumps(_core.cuda_chains()), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print(json.dumps("it has failed"), flush=True)
"""


@contextlib.contextmanager
def processes(package):
    """``run(cwd, folder)``: in a process of its own, a chain is run; what cuda_chains says there."""
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", "ORTMODULE_BUILD": ""}
    command = [sys.executable, "-c", PROGRAM, str(ROOT)]
    with subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:

        def run(cwd, folder):
            print(json.dumps([str(cwd), str(folder)]), file=server.stdin, flush=True)
            found = json.loads(server.stdout.readline())
            assert isinstance(found, dict), found
            return found

        yield run
        server.stdin.close()
        assert server.wait(60) == 0


@pytest.fixture(scope="module")
def run():
    with processes(Path(_core.__file__).resolve().parents[1]) as found:
        yield found


def test_kernels_are_kept_on_disk(run, tmp_path):
    """Damaged files, and files that are another chain's, are compiled again."""
    first = run(tmp_path, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert first["compiled"] == len(files) > 0 and first["read"] == 0
    assert run(tmp_path, tmp_path) == {"compiled": 0, "read": len(files), "reason": ""}
    content = files[0].read_bytes()
    for damaged in (content[:-1], content[:-9] + b"12345678" + content[-1:]):
        files[0].write_bytes(damaged)
        again = run(tmp_path, tmp_path)
        assert (again["compiled"], again["read"]) == (1, len(files) - 1)
        assert files[0].read_bytes() == content
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.parametrize("change", ["group", "others", "link", "pipe"])
def test_kernels_that_others_may_have_written_are_compiled_again(run, change, tmp_path):
    """They would be loaded into a GPU: the checksum says that they are whole, not who made them."""
    folder = tmp_path / "kept"
    folder.mkdir(mode=0o700)
    first = run(tmp_path, folder)
    file, *others = sorted(folder.iterdir())
    content = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    if change in ("group", "others"):
        file.chmod(0o620 if change == "group" else 0o602)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere") if change == "link" else os.mkfifo(file)
    again = run(tmp_path, folder)
    assert (again["compiled"], again["read"]) == (1, first["compiled"] - 1)
    assert not file.is_symlink() and file.read_bytes() == content and file.stat().st_mode & 0o777 == 0o600
    assert sorted(folder.iterdir()) == [file, *others]
    assert run(tmp_path, folder)["compiled"] == 0


def test_a_folder_that_cannot_be_used(run, tmp_path):
    (tmp_path / "file").write_text("")
    found = run(tmp_path, tmp_path / "file" / "deeper")
    assert found["compiled"] > 0 and found["read"] == 0


def test_without_the_library(tmp_path):
    package = tmp_path / "ortmodule"
    shutil.copytree(Path(_core.__file__).parent, package, ignore=shutil.ignore_patterns("libnvrtc*", "__pycache__"))
    with processes(tmp_path) as run:
        found = run(tmp_path, tmp_path)
    assert found == {"compiled": 0, "read": 0, "reason": "there is no NVRTC: libnvrtc.so.13 was not found"}


def nvidias():
    """The path of NVIDIA's library where its package is installed, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else []
    return next((str(file) for folder in folders for file in Path(folder).glob("cu13/lib/libnvrtc.so.13")), None)


#: In a process of its own: two libraries of one name do not get on with each other.
COMPILER = """
import ctypes, json, sys
library, work = ctypes.CDLL(sys.argv[1]), json.load(sys.stdin)
headers, names = ([x.encode() for x in work[key]] for key in ("headers", "names"))
strings = ctypes.c_char_p * len(names)
for text in work["texts"]:
    for architecture in (80, 90, 100):
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        made = library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"chain.cu", len(names), strings(*headers), strings(*names))
        options = [b"--gpu-architecture=sm_%d" % architecture, b"--std=c++17", b"--fmad=false", b"-DORT_DEVICE"]
        result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        library.nvrtcGetProgramLog(program, log)
        assert made == result == 0, text + log.value.decode()
"""


@pytest.mark.skipif(nvidias() is None, reason="NVIDIA's NVRTC is not installed")
def test_nvidias_compiler_takes_them(nvrtc):
    """The very text and headers, for all architectures; nothing is run."""
    everything = rows("Add", "Mul", "Pow", "Mod", "PRelu")
    everything += [(op, f"v{i + 4}", f"v{i + 5}", {}) for i, op in enumerate(["Erf", "Sigmoid", "HardSigmoid", "Tanh"])]
    dropped = [("Dropout", "v8 ratio mode", "v9", {})]
    choice = [("Less", "x0 v1", "c", {}), ("Where", "c x0 v1", "w", {})]
    texts, names = [], []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for more, last in ((choice, "w"), (dropped, "v9")):
            check((dtype, [(4, 9)], [*everything, *more], [last]))
            texts.append(nvrtc.fake_nvrtc_text().decode())
    while nvrtc.fake_nvrtc_name(len(names)):
        names.append(nvrtc.fake_nvrtc_name(len(names)).decode())
    headers = [nvrtc.fake_nvrtc_header(i).decode() for i in range(len(names))]
    work = json.dumps({"texts": texts, "names": names, "headers": headers})
    command = [sys.executable, "-c", COMPILER, nvidias()]
    done = subprocess.run(command, input=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
