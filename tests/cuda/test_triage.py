"""Triage (scripts/gpu triage) on the emulated GPU: its host side, from the first line to the last."""

import sys

import pytest
import torch

from benchmarks.triage import GROUPS
from ortmodule import _core
from tests.rehearsal import Rehearsal

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    # The emulated GPU's memory is the CPU's: torch's own CUDA libraries, where they are loaded, know nothing of it.
    pytest.mark.skipif(torch.version.cuda is not None, reason="a build of torch for CPUs is needed"),
]

#: What there is no library for here, and what the libraries of ours that stand for CUDA's do not take unless told to.
NOT_HERE = {
    "nccl": "there is no NCCL: libnccl.so.2 was not found",
    "nvrtc": "NVRTC error 2 in nvrtcCreateProgram",
    "cudnn": "PyTorch ran aten::convolution",
}


@pytest.fixture
def rehearsal(tmp_path):
    """With the interpreter of the tests."""
    return Rehearsal(tmp_path, sys.executable)


def check(rehearsal, done, items):
    found = {line["item"]: line for line in rehearsal.lines("triage")}
    said = done.stdout + done.stderr + rehearsal.said_in_log()
    assert sorted(found) == sorted(items), said
    assert len(list(rehearsal.out.rglob("*"))) <= 8
    for name, line in found.items():
        if name.startswith("graphs") and line["state"] == "failed":
            assert "was no CUDA graph" in line["reason"], said  # which memory comes back is up to the CPU's malloc
        elif name in NOT_HERE:
            assert line["state"] in ("failed", "not ours") and NOT_HERE[name] in line["reason"], said
        else:
            assert line["state"] == "ok", f"{name}: {line}\n{said}"
            if "ran" in line:
                assert line["ran"]["captured"] and not line["ran"]["aten_ops"] and not line["ran"]["python_ops"]
    return found


def test_the_most_telling(rehearsal):
    """Of each kind an item: it ran on the emulated GPU, in the engine."""
    items = ["engine", "first-kernel", "nvrtc", "linear bfloat16", "attention-dropout float32", "adam bfloat16"]
    items += ["graphs mlp"]
    found = check(rehearsal, rehearsal.run("triage", "--small", "--seconds", "900", "--items", *items), items)
    assert "2 GPUs" in found["engine"]["said"] and "graphs {" in found["graphs mlp"]["said"]


@pytest.mark.full
def test_models(rehearsal):
    items = ["llama autocast", "gpt2-medium ortmodule"]
    check(rehearsal, rehearsal.run("triage", "--small", "--seconds", "900", "--items", *items), items)


@pytest.mark.full
def test_all_of_it(rehearsal):
    """Within its eight minutes: nothing is left out."""
    items = [item for group in GROUPS for item in group.items]
    check(rehearsal, rehearsal.run("triage", "--small"), items)
