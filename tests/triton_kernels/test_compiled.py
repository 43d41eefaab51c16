"""Kernels are compiled for sm_80, sm_90 and sm_100 without a GPU; with a formula of every operator that there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule.triton_kernels.formulas import formulas, pointwise_operators

ROOT = Path(__file__).resolve().parents[2]
ROWS = """rows
operand bfloat16
operand float32
operand bool
operand int64
constant float32 3fe0000000000000
step Cast - 0 -> w:float32
step Mul - 5 4 -> w:float32
step DropoutTrain draws0 6 -> w:float32
step LayerNormalization given1 7 1 -1 -> w:float32 r:float32 r:float32
step Softmax - 8 -> w:float32
step ReduceMax - 11 -> r:float32
step Where - 2 11 12 -> w:float32
step Cast - 13 -> w:bfloat16
results 14 9 10
"""
GRADIENT = """rows
operand float32
operand float32
operand float32
operand float32
operand float32
step LayerNormGrad - 0 1 2 3 4 -1 -> w:float32 C:float32 C:float32
results 5 6 7
"""


def all_formulas():
    """A kernel of elements with every formula of floats, four at a time so that none is too long."""
    found, steps = [], []
    for (name, kind, to), formula in formulas().items():
        if (
            kind != "float32"
            or "float32" not in pointwise_operators().get(name, ())
            or name in ("DropoutTrain", "Where")
        ):
            continue
        steps.append((name, formula.operands, to))
    for i in range(0, len(steps), 24):
        part = steps[i : i + 24]
        lines = ["elements", *["operand float32"] * 4]
        lines += [
            f"step {name} given{j} {' '.join(map(str, range(k)))} -> w:{to}" for j, (name, k, to) in enumerate(part)
        ]
        lines.append("results " + " ".join(str(4 + j) for j in range(len(part))))
        found.append("\n".join(lines) + "\n")
    return found


def compiled(jobs):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_kernels.compile_all"],
        input="".join(json.dumps(job) + "\n" for job in jobs), text=True, capture_output=True, env=environment,
        cwd=ROOT, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_rows_and_gradients(architecture):
    jobs = [(ROWS, how, 700, architecture) for how in ("DCDR|yyy|a", "3S2S|yny|ws")]
    jobs += [(GRADIENT, "DDCRR|yyy|a", width, architecture) for width in (8, 5000)]
    for kernel in compiled(jobs):
        assert kernel["magic"] == "7f454c46" and kernel["threads"] in (128, 256, 512)
        assert kernel["scratch"] == 2 and kernel["shared"] <= 48 << 10


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_formula(architecture):
    programs = all_formulas()
    assert sum(text.count("step ") for text in programs) > 90
    jobs = [(text, "DDDS|" + "y" * text.count("step ") + "|a", 4096, architecture) for text in programs]
    for kernel in compiled(jobs):
        assert kernel["magic"] == "7f454c46"


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_flash_attention(architecture):
    """Forward and backward, with all that attention may have; shared memory is what a block of that GPU may have."""
    jobs = [
        (f"attention {kernel} {dtype} {width} {width} {flags}", "||a", 512, architecture)
        for kernel in ("forward", "backward_queries", "backward_keys")
        for dtype, width, flags in (("bfloat16", 64, "cdk"), ("float16", 128, "abs"), ("float32", 40, "abdskt"))
    ]
    for job, kernel in zip(jobs, compiled(jobs), strict=True):
        assert kernel["magic"] == "7f454c46" and kernel["arguments"] == 45, job
        assert kernel["scratch"] == 2 and kernel["shared"] <= 160 << 10, job
