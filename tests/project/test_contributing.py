"""CONTRIBUTING.md: what its examples show is in the tree, what they add works in a copy, and its commands exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "CONTRIBUTING.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the sources are not there")


def blocks(language):
    """The fenced blocks of a language: [(first line, the rest)]."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [tuple(text.partition("\n")[::2]) for text in found]


def commands():
    return [line for first, rest in blocks("sh") for line in [first, *rest.splitlines()]]


def plain(text):
    """Without what only lays it out: spaces, and the ends of a macro's lines."""
    return " ".join(text.replace("\\\n", " ").split())


# --- excerpts ---------------------------------------------------------------------------------------------------------

EXCERPTS = [
    pytest.param(file, rest, id=f"{file} {number}")
    for number, (first, rest) in enumerate(blocks("c") + blocks("python") if PAGE.exists() else ())
    if (file := "".join(re.findall(r"^(?:/\*|#) in (\S+)", first)))
]


@pytest.mark.parametrize("file, lines", EXCERPTS)
def test_excerpts_are_in_the_tree(file, lines):
    text = plain((ROOT / file).read_text())
    for line in lines.splitlines():
        assert plain(line) in text, f"{file} has no `{line.strip()}`"


def test_a_line_that_is_not_there_is_found():
    with pytest.raises(AssertionError, match="has no `{OURS"):
        test_excerpts_are_in_the_tree("csrc/ops/pointwise/unary.c", '    {OURS("Erfx", pointwise_grad_x, erfx)},')


def test_each_example_names_all_its_files():
    """An operator and a pass: other files that name the example are tests of its numbers, or pages that are written."""
    named = {file.values[0] for file in EXCERPTS}
    for folder, pattern in (("csrc/passes", r"\bsilu_fusion\b"), ("csrc/ops", r'"Erfc"'), ("csrc/cuda", r'"Erfc"')):
        for path in sorted((ROOT / folder).rglob("*.c")) + sorted((ROOT / folder).rglob("*.h")):
            if re.search(pattern, path.read_text()):
                assert str(path.relative_to(ROOT)) in named, f"{path} is not in the example"


# --- what is new ------------------------------------------------------------------------------------------------------


def addition(name):
    """(file, the text before which it is put, what is put there) of the block that adds to a file of that name."""
    for first, rest in blocks("python"):
        found = re.fullmatch(r"# new in (\S+), before `(.+)`", first)
        if found and found[1].endswith(name):
            return *found.groups(), rest
    raise AssertionError(f"no block adds to {name}")


def with_addition(file, before, text):
    """The file's contents with the block."""
    lines = (ROOT / file).read_text().splitlines(keepends=True)
    (at,) = [i for i, line in enumerate(lines) if re.match(rf"\s*{re.escape(before)}:", line)]
    return "".join([*lines[:at], text, *lines[at:]])


SETTING = """
import os
from ortmodule import Config
from ortmodule.core.config import VARIABLES, read_config
from scripts import settings_page

assert "REPORT_PREFIX" in VARIABLES
assert read_config(Config(report_prefix="given")).report_prefix == "given"
assert "| `ORTMODULE_REPORT_PREFIX` | path |  | a text that `explain()` begins with |" in settings_page.page()
os.environ["ORTMODULE_REPORT_PREFIX"] = "text"
assert read_config().report_prefix == "text"
"""


def test_a_new_setting(tmp_path):
    """In a copy of the package: a field, the environment's variable, and a row of the page."""
    file, before, text = addition("config.py")
    package = tmp_path / "ortmodule"
    (package / "core").mkdir(parents=True)
    for path in (ROOT / "ortmodule").iterdir():
        if path.name != "core":
            (package / path.name).symlink_to(path)
    for path in (ROOT / "ortmodule" / "core").iterdir():
        if path.name != "config.py":
            (package / "core" / path.name).symlink_to(path)
    if build := os.environ.get("ORTMODULE_BUILD"):  # its extension, where there may be no other
        for path in (Path(build) / "ortmodule").glob("_core.*.so"):
            (package / path.name).unlink(missing_ok=True)
            (package / path.name).symlink_to(path.resolve())
    (tmp_path / file).write_text(with_addition(file, before, text))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    done = subprocess.run([sys.executable, "-c", SETTING], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_new_model():
    """In a copy of the zoo: it is built, its batches have several sizes, and PyTorch runs it."""
    file, before, text = addition("zoo.py")
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
                texts = [path.read_text() for path in (ROOT / "tests" / "c").glob("test_*.c")]
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
    words = shlex.split(command.replace("python", sys.executable, 1))
    done = subprocess.run(
        [*words, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "::" in done.stdout, done.stdout[-2000:] + done.stderr
