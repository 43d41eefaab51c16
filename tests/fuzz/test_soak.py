"""scripts/soak runs for some seconds, and its report says what has been looked at; something that wears out is told."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "soak"


def test_some_seconds():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(SCRIPT), "--hours", str(10 / 3600), "--seed", "1"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600)
    assert found.returncode == 0, found.stdout + found.stderr
    for word in ("step", "memory over the second half", "file descriptors", "threads"):
        assert word in found.stdout


def loaded():
    loader = importlib.machinery.SourceFileLoader("soak", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("soak", loader))
    loader.exec_module(module)
    return module


def test_what_wears_out_is_told(capsys):
    module = loaded()
    soak = module.Soak.__new__(module.Soak)
    soak.counts, soak.wrong, soak.seconds = {"step": 10}, [], 1
    steady = [(n, 100 << 20, 6, 3) for n in range(10)]
    soak.samples = steady
    assert soak.report() == 0
    for worse in ((10, 500 << 20, 6, 3), (10, 100 << 20, 7, 3), (10, 100 << 20, 6, 4)):
        soak.samples, soak.wrong = [*steady, worse], []
        assert soak.report() == 1
    said = capsys.readouterr().out
    assert "memory grows" in said and "file descriptors are lost" in said and "threads are left" in said
