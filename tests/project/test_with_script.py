"""scripts/test-with: what it takes, and what it does with it, on stand-ins for uv and the environment's Python."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test-with"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the sources are not there")

UV = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case $1 in
venv) mkdir -p "${@: -1}/bin" && cp "$PYTHON_STANDIN" "${@: -1}/bin/python" ;;
pip) [[ $* != *+cpu* ]] ;; # there is no build for CPUs alone
esac
"""
PYTHON = """#!/usr/bin/env bash
echo "python $*" >>"$CALLS"
[[ $* != *pytest* ]] || { echo "FAILED a test"; echo "$SUMMARY"; exit 1; }
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script; what it printed, its status, and the calls of the stand-ins."""
    for name, text in (("uv", UV), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    calls = tmp_path / "calls"

    def call(*arguments, summary="7 passed, 1 failed, 2 skipped in 3s"):
        calls.write_text("")
        environment = os.environ | {
            "ENVIRONMENTS": str(tmp_path / "environments"), "UV": str(tmp_path / "uv"), "CALLS": str(calls),
            "PYTHON_STANDIN": str(tmp_path / "python"), "PYTHON": sys.executable, "SUMMARY": summary,
        }  # fmt: skip
        found = subprocess.run(
            [SCRIPT, *arguments], env=environment, text=True, capture_output=True, timeout=120, cwd=tmp_path
        )
        return found, calls.read_text().splitlines()

    yield call
    for log in (ROOT / "build" / "with").glob("torch-9.8.7-*.log"):
        log.unlink()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((), "which PyTorch?"),
        (("numpy==2.4.6",), "which PyTorch?"),
        (("torch",), "'torch' is no PACKAGE==VERSION"),
        (("torch==",), "'torch==' is no PACKAGE==VERSION"),
        (("torch>=9.8.7",), "is no PACKAGE==VERSION"),
        (("torch==9.8.7", "torch==9.8.6"), "two versions of PyTorch: 9.8.7 and 9.8.6"),
        (("torch==9.8.7", "numpy"), "'numpy' is no PACKAGE==VERSION"),
        (("torch==9.8.7", "a;b==1"), "is no PACKAGE==VERSION"),
        (("torch==9.8.7", "--full"), "there is no option --full"),
        (("torch==9.8.7", "--python"), "--python wants a version such as 3.12"),
        (("torch==9.8.7", "--python", "python3"), "not 'python3'"),
        (("torch==9.8.7", "--python", "3.9"), "Python 3.11 or newer is needed, not 3.9"),
    ],
)
def test_wrong_arguments(run, arguments, sentence):
    found, calls = run(*arguments)
    assert found.returncode == 1 and not calls
    assert sentence in found.stderr and found.stderr.count("\n") == 1 and not found.stdout


def test_torch_is_named_first_in_the_one_command_that_installs(run):
    found, calls = run("torch==9.8.7", "transformers==1.2.3")
    assert found.stdout.splitlines()[-1] == "14 passed, 2 failed" and found.returncode == 1  # two shares
    cpu, plain = [call for call in calls if call.startswith("pip install")]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    folder = f"torch-9.8.7-transformers-1.2.3-python{python}"
    for call, torch in ((cpu, "torch==9.8.7+cpu"), (plain, "torch==9.8.7")):
        packages = re.search(rf"{folder}/bin/python (.*)", call)[1].split()
        assert packages[0] == torch and "transformers==1.2.3" in packages and "setuptools>=77" in packages
        names = [re.split("[=>]=", package)[0] for package in packages]
        assert len(names) == len(set(names)) and {"onnx", "numpy", "pytest"} <= set(names) and "ruff" not in names
    assert [call for call in calls if "setup.py" in call] == [
        f"python setup.py -q build --build-lib build/with/{folder}"
    ]
    shares = [call for call in calls if "-m pytest" in call]
    assert sorted(call.split()[-2] for call in shares) == ["--from-back", "--from-front"]
    tests = [ROOT / word for word in shares[0].split() if word.startswith("tests/")]
    assert len(tests) > 10 and all(test.exists() for test in tests)


def test_a_second_run_installs_nothing(run):
    run("torch==9.8.7")
    found, calls = run("torch==9.8.7", summary="9 passed in 3s")
    assert not [call for call in calls if call.startswith(("pip", "venv"))]
    assert found.stdout.splitlines()[-1] == "18 passed, 1 failed" and found.returncode == 1  # a status is believed
