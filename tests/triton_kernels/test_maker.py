"""Tests the maker of Triton kernels: where there is none, and the ways in which a kernel may be cut."""

import pytest
import torch

from ortmodule.triton_kernels import interpreted, maker

GPU = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("capability", "sentence"),
    [((7, 5), "this GPU has compute capability 7.5, and kernels are compiled from 8.0 on"), ((8, 0), ""), ((9, 0), "")],
)
def test_capabilities(monkeypatch, capability, sentence):
    monkeypatch.setattr(interpreted, "is_on", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    assert maker.refusal(GPU) == sentence


def test_the_interpreter_is_no_gpu(monkeypatch):
    monkeypatch.setattr(interpreted, "is_on", lambda: True)
    assert "on the CPU, and this module is on a GPU" in maker.refusal(GPU) and maker.refusal(None) == ""


@pytest.mark.parametrize("width", [1, 48, 1000, 16384])
def test_cuts_of_rows(width):
    """The first is that of a kernel that was not measured; all hold a row, and have warps that a GPU can start."""
    ways = maker.ways_of("rows\n", width)
    shapes = [maker.Shape(*map(int, way.split("x"))) for way in ways]
    assert shapes[0] == maker.shape_of(True, maker.room_of(width)) and len(set(shapes)) == len(shapes) > 2
    assert all(1 <= shape.block <= 64 and shape.warps in (1, 2, 4, 8, 16) for shape in shapes)


def test_a_job_is_cut_as_it_is_asked_for():
    program = "elements\noperand float32\nstep Tanh given0 0 -> w:float32\nresults 1\n"
    assert maker.job_of(program, "D|y|a", 4096).block == 1024
    job = maker.job_of(program, "D|y|a", 4096, "512x4x1")
    assert (job.block, job.warps, job.constants["BLOCK"]) == (512, 4, 512)


@pytest.mark.parametrize("kernel", ["forward", "backward_queries", "backward_keys"])
def test_cuts_of_attention(kernel):
    program = f"attention {kernel} bfloat16 64 64 c"
    ways = maker.ways_of(program, 512)
    assert len(ways) > 2 and maker.job_of(program, "||a", 512) == maker.job_of(program, "||a", 512, ways[0])
    assert maker.job_of(program, "||a", 512, ways[-1]).constants["OTHER"] == int(ways[-1].split("x")[1])


def test_a_cut_that_is_none_makes_no_kernel():
    program = "elements\noperand float32\nstep Tanh given0 0 -> w:float32\nresults 1\n"
    assert maker.Maker().compile(program, "D|y|a", 1, 4096, 90, "as it likes") is None
