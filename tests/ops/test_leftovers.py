"""Runs every case over stacks of zeros and of NaN: what a kernel has not written changes no bit.

What is read without having been written counts nothing where it is multiplied by zero, but for a NaN: then a result is
wrong, or is made again in another order. Only the stacks' past says when, so such a fault is met in some runs alone.
"""

import ctypes
import subprocess

import pytest
import torch

from tests.ops.harness import ON_GPU, Trial
from tests.ops.one_type import IN_ONE_TYPE

pytestmark = pytest.mark.skipif(ON_GPU, reason="kernels of GPUs have no stacks to fill")

#: Each thread's stack is filled as far as a kernel may use it (core/scratch.h), but for what a call needs itself.
FILLER = """
void fill(int byte) {
#pragma omp parallel
    {
        volatile unsigned char room[240 << 10];
        for (unsigned i = 0; i < sizeof room; i++) room[i] = (unsigned char)byte;
    }
}
"""


@pytest.fixture(scope="module")
def fill(tmp_path_factory):
    """A function that fills the stacks of all threads with a byte."""
    folder = tmp_path_factory.mktemp("filler")
    (folder / "filler.c").write_text(FILLER)
    command = ["gcc", "-O1", "-fopenmp", "-shared", "-fPIC", "-o", folder / "filler.so", folder / "filler.c"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "filler.so")).fill


class Over:
    """A plan whose runs begin on stacks that hold ``byte``."""

    def __init__(self, plan, fill, byte):
        self.plan, self.fill, self.byte = plan, fill, byte

    def __getattr__(self, name):
        return getattr(self.plan, name)

    def forward(self, *given):
        self.fill(self.byte)
        return self.plan.forward(*given)

    def backward(self, *given):
        self.fill(self.byte)
        return self.plan.backward(*given)


def bits(trial, fill, byte):
    """Of all results and gradients of a run on stacks that hold ``byte``."""
    plan = Over(trial.plan(bool(trial.wrt)), fill, byte)
    trial.plan = lambda *_: plan
    try:
        found = trial.run(training=bool(trial.wrt))
    finally:
        del trial.plan
    return [None if x is None else x.reshape(-1).view(torch.uint8) for x in found.outputs + found.grads]


@pytest.mark.parametrize(("case", "dtype"), IN_ONE_TYPE)
def test_what_is_on_the_stacks_changes_nothing(case, dtype, fill):
    trial = Trial(case, dtype)
    zeros, nans = bits(trial, fill, 0), bits(trial, fill, 0xFF)
    for i, (a, b) in enumerate(zip(zeros, nans, strict=True)):
        assert (a is None and b is None) or torch.equal(a, b), f"output or gradient {i} depends on the stack"
