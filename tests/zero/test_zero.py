"""ORTModule, FusedAdam and FP16_Optimizer under DeepSpeed, in two processes: all as without them."""

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

from tests.workers import ROOT, package_path, texts_of_ranks

LIMIT = 480  # seconds; two busy cores need 60
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def environment():
    return os.environ | {"PYTHONPATH": package_path(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def rows_of(worker, folder, *arguments):
    """The lines of JSON that each of two ranks of a module has printed."""
    # FusedAdam first: DeepSpeed learns of it when it is imported.
    imports = ["torch._dynamo", "ortmodule.optim", "deepspeed.pipe"]
    texts = texts_of_ranks(f"tests.zero.{worker}", folder, *arguments, imports=imports, seconds=LIMIT)
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]


@pytest.fixture(scope="module")
def cells(request, tmp_path_factory):
    """What each of both ranks has seen, by cell: (type, stage, number of options) -> [rank 0's, rank 1's]. One pair of
    processes runs those of the types that are tested."""
    kinds = dict.fromkeys(cell[0] for cell in CELLS)
    folder = tmp_path_factory.mktemp("cells")
    rows = rows_of("worker", folder, ",".join(kinds), str(folder))
    return {
        (pair[0]["dtype"], pair[0]["stage"], len(pair[0]["options"])): pair for pair in zip(*rows, strict=True)
    }  # fmt: skip


def assert_same(ours, theirs, tolerance):
    """Losses and norms as close as the type allows; the same steps are skipped, the scale is the same."""
    for (loss, scale, skipped, norm), (their_loss, their_scale, their_skipped, their_norm) in zip(
        ours, theirs, strict=True
    ):
        assert (scale, skipped) == (their_scale, their_skipped)
        if math.isfinite(their_loss):
            assert loss == pytest.approx(their_loss, rel=tolerance)
        assert (norm is None) == (their_norm is None)
        if norm is not None:
            assert norm == pytest.approx(their_norm, rel=5 * tolerance)


CELLS = [(dtype, *cell) for dtype in TOLERANCE for cell in [(0, 0), (1, 0), (2, 0), (3, 1), (3, 0)]]
CELLS.append(("bfloat16", 1, 1))
#: By optimizer: what one pass over the gradients does instead of several.
REPLACED = {
    "FusedAdam": [],
    "FP16_UnfusedOptimizer": ["has_overflow_serial", "unscale_and_clip_grads"],
    "DeepSpeedZeroOptimizer": [
        "get_grad_norm_direct", "has_overflow_partitioned_grads_serial", "unscale_and_clip_grads",
    ],
    "DeepSpeedZeroOptimizer_Stage3": [
        "get_grad_norm_direct", "has_overflow", "has_overflow_partitioned_grads_serial", "unscale_and_clip_grads",
    ],
    "BF16_Optimizer": ["get_grads_for_norm"],
}  # fmt: skip


@needs_deepspeed
@pytest.mark.together  # one pair of processes runs all
@pytest.mark.parametrize("dtype, stage, options", CELLS)
def test_training(dtype, stage, options, cells):
    for cell in cells[dtype, stage, options]:
        assert cell["replaced"] == REPLACED[cell["optimizer"]]
        assert cell["captured"], cell["fallback"]
        gathered = stage == 3 and not options  # by hooks on these submodules, which PyTorch runs inside the graph
        assert {name.rpartition(".")[2] for name in cell["outside"]} == ({"table", "block"} if gathered else set())
        assert_same(cell["ours"], cell["theirs"], TOLERANCE[dtype])
        skipped = [row[2] for row in cell["ours"]]
        assert skipped == [dtype != "float32" and i == 2 for i in range(6)]
        scales = [row[1] for row in cell["ours"]]
        assert scales == ([256, 256, 128, 128, 128, 256] if dtype == "float16" else [1] * 6)


@needs_deepspeed
@pytest.mark.together  # one pair of processes runs all
@pytest.mark.parametrize("dtype, stage, options", CELLS)
def test_checkpoints_load_across(dtype, stage, options, cells):
    for cell in cells[dtype, stage, options]:
        for direction in ("ours from theirs", "theirs from ours"):
            assert_same(*cell[direction], TOLERANCE[dtype])


@pytest.mark.parametrize("way", [pytest.param("DeepSpeed", marks=needs_deepspeed), "Plain"])
def test_example(way):
    command = [sys.executable, "-m", "examples.mixed_precision.train", "--steps", "2", "--batch-size", "4"]
    command += ["--dtype", "float16"] + ["--plain"] * (way == "Plain")
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and f"{way}, float16: " in done.stdout, done.stderr[-3000:]


@needs_deepspeed
def test_pipeline(tmp_path):
    """DeepSpeed's pipeline of two stages: losses and parameters as of its own module, every layer in the engine."""
    for (row,) in rows_of("pipeline_worker", tmp_path):
        assert row["fallbacks"] == [] and row["names"]
        (ours, parameters), (theirs, expected) = row["ours"], row["theirs"]
        assert ours == pytest.approx(theirs, rel=1e-5)
        for found, values in zip(parameters, expected, strict=True):
            assert found == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_pipeline_without_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", None)
    monkeypatch.delitem(sys.modules, "ortmodule.compat.pipeline", raising=False)
    with pytest.raises(ImportError, match="is for DeepSpeed's pipelines, and deepspeed cannot be imported"):
        importlib.import_module("ortmodule.compat.pipeline")
