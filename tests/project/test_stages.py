"""Stages of scripts/test have names, every test has a stage, and what has passed is known by what it reads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import stages
from tests.selection import (
    COLLECTED,
    FAMILIES,
    FAST,
    NOT_FAST,
    OF_TESTS,
    TURNS,
    WHOLE,
    in_turn,
    one_of,
    sample,
    waiting,
)

ROOT = Path(__file__).resolve().parents[2]


def test_a_stage_that_is_not_there():
    done = subprocess.run([ROOT / "scripts" / "test", "pytets"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    known = subprocess.run([ROOT / "scripts" / "test", "--stages"], capture_output=True, text=True).stdout.split()
    assert f"there is no stage pytets; the stages are: {', '.join(known)}" in done.stderr
    assert {"python-style", "c", "pytest", "emulated", "sanitized", "every-test"} <= set(known)


def test_every_stage_says_where_its_tests_are():
    """Without a path pytest takes the file that two processes share for one, and does not find its own settings."""
    text = (ROOT / "scripts" / "test").read_text()
    commands = re.findall(r"\$(?:PYTEST|\{PYTEST[^}]*\})(?![A-Za-z+=])((?:[^\"\n]|\\\\\n)*)", text)
    assert len(commands) >= 9
    assert all(re.search(r" (tests|\$SANITIZED)\b", command) for command in commands), commands


@pytest.mark.parametrize("dies", ["", "--from-front", "--from-back"])
def test_a_share_that_ends_early_has_failed(dies):
    """As when a sanitizer ends its process, after which pytest counts nothing."""
    share = f'echo "== $1"; [ "$1" != "{dies}" ] || kill -ABRT $$; echo "3 passed, 1 skipped in 0.1s"'
    command = ["bash", "-c", f". scripts/common.sh; in_shares bash -c '{share}' share"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "== --from-front" in done.stdout and "== --from-back" in done.stdout
    counted = dict(reversed(each.split()) for each in done.stdout.splitlines()[-1].split(", "))
    if dies:
        assert done.returncode != 0 and counted == {"passed": "3", "skipped": "1", "error": "1"}
    else:
        assert done.returncode == 0 and counted == {"passed": "6", "skipped": "2"}


#: For an environment's Python: a build of PyTorch, which torchvision's can be imported, and which are to be had.
OF_TORCH = """#!/usr/bin/env bash
case $* in
*torch.version*) echo "$BUILD" ;;
*"pip install"*+cpu*) [ "$INDEX" ] && echo cpu >"$0.has" ;;
*"pip install"*) [ -e "$0.has" ] || echo "" >"$0.has" ;;
*"pip uninstall"*) rm "$0.has" ;;
*"import torchvision"*) [ "$(cat "$0.has")" = "${BUILD#+}" ] ;;
esac
"""


@pytest.mark.parametrize(
    ("build", "index", "left"), [("+cpu", "yes", "cpu"), ("+cpu", "", None), ("", "", "")], ids=["CPU", "none", "CUDA"]
)
def test_torchvision_is_of_the_build_of_torch(build, index, left, tmp_path):
    """One that cannot be imported is not left there: transformers would import it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(OF_TORCH)
    python.chmod(0o755)
    command = ["bash", "-c", f". scripts/common.sh; VENV={tmp_path}; install_libraries"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"BUILD": build, "INDEX": index}
    )
    assert done.returncode == 0, done.stderr
    has = python.with_name("python.has")
    assert (has.read_text().strip() if has.exists() else None) == left
    assert ("no torchvision for this build" in done.stdout) is (left is None)


def test_fast_is_a_sample_of_every_kind(request):
    """Of all tests that are collected here: of each file that --fast names, and of each family of operators."""
    items = request.session.items
    chosen = sample(items)
    here = {item.nodeid.partition("::")[0] for item in items}
    assert {item.nodeid.partition("::")[0] for item in chosen} == here & FAST.keys()
    assert all((ROOT / file).exists() for file in FAST)
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == {file.split("/")[1] for file in FAST} | set(NOT_FAST)
    families = {item.nodeid.partition("[")[2].partition("-")[0] for item in chosen if FAMILIES in item.nodeid}
    assert families == {i.nodeid.partition("[")[2].partition("-")[0] for i in items if FAMILIES in i.nodeid}


def test_fast_runs_stages_that_there_are():
    text = (ROOT / "scripts" / "test").read_text()
    known = subprocess.run([ROOT / "scripts" / "test", "--stages"], capture_output=True, text=True).stdout.split()
    (named,) = re.findall(r'--fast\) STAGES\+="(.*?) "', text)
    assert set(named.split()) <= set(known)


READ = ("csrc", "ortmodule", "optim", "tests", "examples", "benchmarks", "docs", "scripts", ".github")
FILES = (
    "setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md",
    ".pre-commit-config.yaml",
)  # fmt: skip


def test_what_has_passed_is_known_by_all_that_tests_read(tmp_path):
    """--full leaves out what has passed only where nothing of this is another: files, Python, its packages."""
    for folder in READ:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
    for name in FILES:
        (tmp_path / name).touch()
    shutil.copy(ROOT / "scripts" / "common.sh", tmp_path / "scripts")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho torch==2.13.0\n")
    python.chmod(0o755)

    def key():
        command = ["bash", "-c", f". {tmp_path}/scripts/common.sh; hash_of_sources"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    keys = [key()]
    assert key() == keys[0]
    for path in [*(tmp_path / folder / "file" for folder in READ), *(tmp_path / name for name in FILES)]:
        path.write_text("another")
        keys.append(key())
    python.write_text("#!/bin/sh\necho torch==2.14.0\n")
    keys.append(key())
    assert len(set(keys)) == len(keys) == 2 + len(READ) + len(FILES)
    (tmp_path / "ortmodule" / "__pycache__").mkdir()
    (tmp_path / "ortmodule" / "__pycache__" / "file.pyc").touch()
    (tmp_path / "ortmodule" / "_core.abi3.so").touch()
    assert key() == keys[-1]  # these are made of what has been counted


def test_types_have_names(request):
    """So that tests can be chosen by them."""
    numbered = [item.nodeid for item in request.session.items if re.search(r"[\[-]dtype\d+[-\]]", item.nodeid)]
    assert not numbered


def test_folders_are_marked(request):
    for item in request.session.items:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        if folder in ("cuda", "gpu"):
            assert item.get_closest_marker("emulated"), item.nodeid
            assert bool(item.get_closest_marker("sanitized")) == (folder == "cuda"), item.nodeid


def test_files_of_the_emulated_gpu_say_so(request):
    """`scripts/test` looks for the word in files outside of these folders."""
    marked = {item.path for item in request.session.items if item.get_closest_marker("emulated")}
    for path in marked:
        assert path.relative_to(ROOT / "tests").parts[0] in ("cuda", "gpu") or "mark.emulated" in path.read_text(), path


TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    raise ValueError

@pytest.mark.full
def test_long():
    pass

@pytest.mark.skipif(True, reason="it rains")
def test_weather():
    pass

def test_left_out():
    pass
"""


def test_what_no_stage_has_run(tmp_path, capsys):
    """What runs of pytest have written together."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    for name, selected in (("one", "not left_out and not bad"), ("other", "bad")):
        subprocess.run([*command, "--ran", tmp_path / name, "-k", selected], cwd=ROOT, capture_output=True)
    files = [str(file) for file in sorted(tmp_path.glob("o*-front"))]
    assert len(files) == 2
    assert stages.main(files) == 1
    said = capsys.readouterr().out
    assert "1 tests are run by no stage (it rains):\n  test_some.py::test_weather\n" in said
    assert "1 tests are run by no stage (no stage selects it):\n  test_some.py::test_left_out\n" in said
    assert "test_long" not in said and "2 tests were run" in said
    assert stages.main(["--full", *files]) == 1
    assert "(only with --full):\n  test_some.py::test_long\n" in capsys.readouterr().out
    (tmp_path / "passed").write_text("".join(f"test_some.py::test_{n}\n" for n in ("long", "weather", "left_out")))
    assert stages.main(["--full", *files, str(tmp_path / "passed")]) == 0


def test_two_processes_share_the_tests(tmp_path):
    """Each test runs once, those that belong together in one process; what one that dies leaves, the other runs."""
    (tmp_path / "conftest.py").write_text(
        "from tests.both_ends import BothEnds\n"
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--from-front')\n"
        "    parser.addoption('--from-back')\n"
        "def pytest_configure(config):\n"
        "    front, back = config.getoption('--from-front'), config.getoption('--from-back')\n"
        "    config.pluginmanager.register(BothEnds(front or back, bool(back), lambda item: item.name[:6]))\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, pytest, time\n"
        "@pytest.mark.parametrize('i', range(60))\n"
        "def test(i, request):\n"
        "    if i == 5 and os.environ.get('DIES'): os._exit(7)\n"
        "    with open('ran', 'a') as file: file.write(f'{request.node.name} {os.getpid()}\\n')\n"
        "    time.sleep(0.005)\n"
    )
    share = f'cd {tmp_path}; exec {sys.executable} -m pytest -q -c /dev/null --rootdir . . "$@"'
    command = ["bash", "-c", f". scripts/common.sh; in_shares bash -c '{share}' share"]
    for dies in {}, {"DIES": "1"}:
        (tmp_path / "ran").write_text("")
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | dies
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode != 0) == bool(dies), done.stdout + done.stderr
        lines = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
        expected = [f"test[{i}]" for i in range(60) if not dies or f"{i}"[0] != "5"]
        assert sorted(name for name, _ in lines) == sorted(expected)
        groups = {(name[:6], process) for name, process in lines}
        assert len(groups) == len({name for name, _ in groups})
        if not dies:
            assert "60 passed" in done.stdout.splitlines()[-1]
            assert len({process for _, process in lines}) == 2


def test_what_waits_for_full_is_one_of_several(request):
    """Of each test there is a case in the ordinary run, and of those with several one that waits."""
    collected = {}
    names = request.config.stash[COLLECTED]
    left = waiting(names)
    for name in names:
        collected.setdefault(name.partition("[")[0], []).append(name in left)
    assert all((ROOT / test.partition("::")[0]).exists() for test in OF_TESTS)
    assert all((ROOT / "tests" / folder).is_dir() for folder in WHOLE)
    for test, waits in collected.items():
        assert set(waits) == ({True, False} if one_of(test, len(waits)) > 1 else {False}), test


def test_each_turn_takes_another_part_of_what_waits_for_full(tmp_path):
    """A hundredth of it, beside all that does not wait; after a hundred turns each test has run."""
    names = [f"tests/capture/test_it.py::test_long[{i}]" for i in range(3000)]
    parts = [{name for name in names if in_turn(name, turn)} for turn in range(TURNS)]
    assert set().union(*parts) == set(names) and sum(map(len, parts)) == len(names)
    assert all(15 <= len(part) <= 55 for part in parts)
    assert {name for name in names if in_turn(name, TURNS + 7)} == parts[7]

    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.full\n"
        "@pytest.mark.parametrize('i', range(200))\n"
        "def test_long(i): pass\n"
        "def test_short(): pass\n"
    )
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    said = [
        subprocess.run([*command, tmp_path, *more], cwd=ROOT, capture_output=True, text=True).stdout
        for more in ([], ["--some", "--turn", "7"], ["--full"])
    ]
    here = [{line for line in text.splitlines() if line.startswith("test_it.py::")} for text in said]
    long = {f"test_it.py::test_long[{i}]" for i in range(200)}
    assert here[0] == {"test_it.py::test_short"} and here[2] == here[0] | long
    assert here[1] == here[0] | {name for name in long if in_turn(name, 7)}
