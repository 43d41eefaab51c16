"""CONTRIBUTING.md: what its examples show is in the tree, what they add works in a copy, and its commands exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortmodule import _core

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the sources are not there")


def blocks(language):
    """The fenced blocks of a language: [(first line, the rest)]."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [tuple(text.partition("\n")[::2]) for text in found]


def commands():
    return [line for first, rest in blocks("sh") for line in [first, *rest.splitlines()]]


# --- what is new ------------------------------------------------------------------------------------------------------


def additions(heading):
    """The blocks under a heading: [(file, the text before which it goes, what goes there), ...].

    A new file has None instead of a text before."""
    _, _, section = PAGE.read_text().partition(f"\n## {heading}\n")
    pattern = r"^```\w+\n(?:/\*|#) new (?:in (\S+), before `(.+?)`|file (\S+)).*?\n(.*?)^```$"
    found = re.findall(pattern, section.partition("\n## ")[0], re.M | re.S)
    found = [(file or new, before or None, text) for file, before, new, text in found]
    assert found, f"nothing is added under {heading}"
    return found


def with_addition(file, before, text, root=ROOT):
    """The file's contents with the block."""
    if before is None:
        assert not (root / file).exists(), f"{file} is there already"
        return text
    lines = (root / file).read_text().splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if line.lstrip().startswith(before)]
    return "".join([*lines[:at], text, *lines[at:]])


def copy_with(blocks, root):
    """The tree with these blocks, and what is compiled, in another folder. Returns the environment to build in."""
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.so.*")
    for name in ("csrc", "optim", "ortmodule", "scripts", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=left_out)
    for name in ("LICENSE", "README.md", "benchmarks", "docs", "pyproject.toml", "setup.py"):
        (root / name).symlink_to(ROOT / name)
    for kind in ("release", "emulated")[: 1 + _core.emulated]:
        for objects in (ROOT / "build").glob(f"temp.*/{kind}"):
            shutil.copytree(objects, root / objects.relative_to(ROOT))
    for block in blocks:
        (root / block[0]).write_text(with_addition(*block, root))
    # By the compiler that made the objects, or they are made anew.
    made = next((root / "build").glob("temp.*/release/csrc/core/*.command"), None)
    compiler = {"CC": made.read_text().partition(" -std=")[0]} if made else {}
    return os.environ | compiler


def added():
    """What operators and passes that are new bring."""
    return [text for heading in ("Add an operator", "Add a pass") for *_, text in additions(heading)]


def count(blocks):
    """Edits and files: the measure of a change."""
    return len(blocks), len({file for file, *_ in blocks})


def run(command, root, environment):
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


OPERATOR = """
import torch
from ortmodule import ORTModule, _core
from ortmodule.debug.onnx_operators import TABLE
from tests.ops import table
from tests.ops.cases import CASES

class Roots(torch.nn.Module):
    def forward(self, x):
        return torch.rsqrt(x) * x

assert ("Rsqrt", "rsqrt", 1) in _core.pointwise_operators()
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    ours, theirs = (torch.linspace(0.25, 3, 41, dtype=dtype).requires_grad_() for _ in range(2))
    model = ORTModule(Roots())
    y, z = model(ours), Roots()(theirs)
    y.sum().backward()
    z.sum().backward()
    few = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y, z, rtol=few, atol=few)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=few, atol=few)
    assert not model._ortmodule.fallback.reason, model._ortmodule.fallback.reason
    (graphs,) = model._ortmodule.graphs.values()
    exported = {(node.domain, node.op_type) for node in graphs[0].capture.model.graph.node}
    assert ("ortmodule", "Rsqrt") in exported, exported
# Promoted as PyTorch does, and in the reference.
whole = torch.arange(1, 5)
torch.testing.assert_close(ORTModule(Roots())(whole), Roots()(whole))
assert torch.equal(TABLE["ortmodule", "Rsqrt"]({}, 1, torch.full((2,), 4.0)), torch.full((2,), 0.5))
cases = [case for case in CASES if case.op == "ortmodule::Rsqrt"]
assert len(cases) == 5 and {r["name"] for r in table.records_of(cases[0])} >= {"Rsqrt", "RsqrtGrad"}
"""
CHAIN = """
import ctypes
import torch
from ortmodule import ORTModule
from tests.cuda.test_emulated import library

class Roots(torch.nn.Module):
    def forward(self, x):
        return torch.rsqrt(x) * x

fake = library("libnvrtc.so.13")
fake.fake_nvrtc_text.restype = ctypes.c_char_p
fake.fake_nvrtc_allow(1)
x = torch.rand(5, 7) + 0.1
torch.testing.assert_close(ORTModule(Roots())(x), Roots()(x))
text = fake.fake_nvrtc_text().decode()
assert "KERNEL(chain" in text and "1 / sqrt(x)" in text, text
"""


#: What lists the operators is included by many files: minutes of compiling, so the CPU's build alone is for --full.
COMPILES_MUCH = pytest.mark.emulated if _core.emulated else pytest.mark.full


@COMPILES_MUCH
def test_a_new_operator(tmp_path):
    """In a copy of the tree, where what has changed is compiled: its cases pass, it is exported, chains have it."""
    blocks = additions("Add an operator")
    edits, files = count(blocks)
    assert edits <= 4 and files <= 3
    environment = copy_with(blocks, tmp_path)
    build = ["build_ext", "--inplace"]
    if _core.emulated:
        environment |= {"EMULATED": "1", "ORTMODULE_BUILD": "build/emulated"}
        environment |= {"PYTHONPATH": "build/emulated:.", "PYTHONSAFEPATH": "1"}
        build = ["build", "--build-lib", "build/emulated"]
    run([sys.executable, "setup.py", "-q", *build], tmp_path, environment)
    cases = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_ops.py", "-k", "Rsqrt"]
    passed = run(cases, tmp_path, environment)
    least = 10 if _core.emulated else 20  # float16 and float64 are run there with --full alone
    assert int(re.search(r"(\d+) passed", passed)[1]) >= least, passed
    for script in (OPERATOR, CHAIN)[: 1 + _core.emulated]:
        run([sys.executable, "-c", script], tmp_path, environment)


PAGE_OF_PASSES = """
from pathlib import Path
from scripts import passes_page

text = Path("docs/passes.md").read_text()
(row,) = set(passes_page.page(text).splitlines()) - set(text.splitlines())
assert row == "| `expm1_fusion` | exp(x) - 1 → Expm1(x) | before | `test_passes.c` | `test_passes.py` |", row
"""


@pytest.mark.full
def test_a_new_pass(tmp_path):
    """In a copy of the tree: its test in C, its cases in Python, and its row of the page."""
    blocks = additions("Add a pass")
    assert count(blocks)[1] <= 4
    environment = copy_with(blocks, tmp_path)
    run([sys.executable, "setup.py", "-q", "test_c", "--only=exp_minus_one"], tmp_path, environment)
    run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], tmp_path, environment)
    cases = ["tests/passes/test_passes.py", "-k", "expm1_fusion"]
    passed = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases], tmp_path, environment)
    assert int(re.search(r"(\d+) passed", passed)[1]) >= 3, passed
    run([sys.executable, "-c", PAGE_OF_PASSES], tmp_path, environment)


SETTING = """
import os
import torch
from ortmodule import Config, ORTModule, explain
from ortmodule.core.config import VARIABLES, read_config
from scripts import settings_page

assert "REPORT_PREFIX" in VARIABLES
assert read_config(Config(report_prefix="given")).report_prefix == "given"
assert "| `ORTMODULE_REPORT_PREFIX` | path |  | a text that `explain()` begins with |" in settings_page.page()
os.environ["ORTMODULE_REPORT_PREFIX"] = "mine:"
assert str(explain(ORTModule(torch.nn.Linear(2, 2)))).startswith("mine:Linear: PyTorch runs it")
"""


def test_a_new_setting(tmp_path):
    """In a copy of the package: a field, what reads it, the environment's variable, and a row of the page."""
    blocks = additions("Add a setting")
    assert count(blocks) == (2, 2)
    shutil.copytree(ROOT / "ortmodule", tmp_path / "ortmodule", ignore=shutil.ignore_patterns("__pycache__"))
    if build := os.environ.get("ORTMODULE_BUILD"):  # its extension, where there may be no other
        for path in (Path(build) / "ortmodule").glob("_core.*.so"):
            (tmp_path / "ortmodule" / path.name).unlink(missing_ok=True)
            (tmp_path / "ortmodule" / path.name).symlink_to(path.resolve())
    for block in blocks:
        (tmp_path / block[0]).write_text(with_addition(*block))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    run([sys.executable, "-c", SETTING], tmp_path, os.environ)


def test_a_new_model():
    """In a copy of the zoo: it is built, its batches have several sizes, and PyTorch runs it."""
    ((file, before, text),) = additions("Add a model")
    zoo = {"__name__": "tests.models.copied_zoo"}
    sys.modules["tests.models.copied_zoo"] = type(sys)("tests.models.copied_zoo")  # dataclasses look for it
    try:
        exec(compile(with_addition(file, before, text), file, "exec"), zoo)
    finally:
        del sys.modules["tests.models.copied_zoo"]
    from tests.models.zoo import ARCHITECTURES

    (name,) = zoo["ARCHITECTURES"].keys() - ARCHITECTURES.keys()
    module = zoo["ARCHITECTURES"][name].build()
    sizes = set()
    for size in range(len(zoo["SHAPES"])):
        batch = zoo["ARCHITECTURES"][name].batch(module, size, torch.Generator().manual_seed(0))
        sizes.add(tuple(batch["input_ids"].shape))
        assert module(**batch).loss.isfinite()
    assert len(sizes) == len(zoo["SHAPES"])


# --- commands ---------------------------------------------------------------------------------------------------------


def stages():
    said = subprocess.run([ROOT / "scripts" / "test", "--stages"], capture_output=True, text=True, check=True)
    return said.stdout.split()


def test_commands_exist():
    assert len(commands()) >= 12
    for command in commands():
        program, *words = shlex.split(command)
        if program == "scripts/test":
            text = (ROOT / program).read_text()
            for word in words:
                assert word in stages() or (word.startswith("--") and f"    {word})" in text), command
        elif program == "python" and words[0] == "setup.py":
            assert words[1] in ("build_ext", "test_c"), command
            for word in words[2:]:
                name = word.partition("=")[2]
                texts = [path.read_text() for path in (ROOT / "tests" / "c").glob("test_*.c")] + added()
                assert word == "--inplace" or any(re.search(rf"^TEST\(\w*{name}", t, re.M) for t in texts), command
        elif program == "python" and words[:2] == ["-m", "pytest"]:
            (file,) = [word for word in words if word.endswith(".py")]
            assert (ROOT / file).exists() and words[-2] == "-k", command
        elif program == "python":
            path = ROOT / words[1].replace(".", "/")
            assert words[0] == "-m" and (path.with_suffix(".py").exists() or (path / "__main__.py").exists()), command
        else:
            assert command == ". .venv/bin/activate", f"{command}: no test knows it"


@pytest.mark.parametrize("command", [c for c in commands() if "-m pytest" in c] if PAGE.exists() else ())
def test_what_pytest_is_told_selects_tests(command):
    """Those of what is new run in the copy."""
    if any(re.search(rf"\b{command.split()[-1]}\b", text) for text in added()):
        return
    words = shlex.split(command.replace("python", sys.executable, 1))
    done = subprocess.run(
        [*words, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "::" in done.stdout, done.stdout[-2000:] + done.stderr
