"""Each fuzz target runs some times over its corpus and mutations of it (docs/fuzzing.md); a fault is kept."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGE = pytest.mark.skipif(os.environ.get("STAGE") != "fuzz", reason="builds with sanitizers: run by the stage fuzz")
#: Executions of each in some twenty seconds of one core, the same ones everywhere; `scripts/fuzz` runs more.
RUNS = {
    "graphs": 15_000,
    "resources": 20_000,
    "onnx": 230_000,
    "schedules": 2_700,
    "between": 1_700,
    "attributes": 100,
    "programs": 5,
    "pytorch": 250,
    "replay": 40,
}


def fuzz(*arguments):
    command = [sys.executable, ROOT / "scripts" / "fuzz", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=1500)


def listed():
    return [line.split()[0] for line in fuzz("--list").stdout.splitlines()]


def test_every_target_is_run():
    assert listed() == [*RUNS]


@STAGE
@pytest.mark.parametrize("target", RUNS)
def test_target(target):
    found = fuzz(target, "--quick", "--runs", RUNS[target], "--seed", 1)
    assert found.returncode == 0, found.stdout + found.stderr
    assert int(re.findall(r"(\d+) executions", found.stdout)[-1]) >= RUNS[target]


@STAGE
def test_a_fault_is_kept(tmp_path):
    """A program that reads behind its input: the driver keeps the bytes."""
    (tmp_path / "target.c").write_text(
        '#include "fuzz.h"\n'
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {\n"
        "    volatile uint8_t behind = size > 2 && data[0] == 'x' ? data[size] : 0;\n"
        "    return behind * 0;\n"
        "}\n"
    )
    program, corpus = tmp_path / "target", tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "seed").write_bytes(b"abc")
    flags = ["-fsanitize=address,undefined", "-O0", f"-I{ROOT}/tests/fuzz"]
    sources = [tmp_path / "target.c", ROOT / "tests" / "fuzz" / "driver.c"]
    subprocess.run(["gcc", *flags, *sources, "-o", program], check=True)
    command = [program, f"-artifact_prefix={tmp_path}/", "-max_total_time=60", corpus]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode != 0 and "heap-buffer-overflow" in found.stderr
    (kept,) = tmp_path.glob("crash-*")
    assert kept.read_bytes()[:1] == b"x"
    again = subprocess.run([program, f"-artifact_prefix={tmp_path}/", kept], capture_output=True, text=True)
    assert again.returncode != 0
