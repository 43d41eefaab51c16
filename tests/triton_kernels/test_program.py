"""A kernel's program is read as the engine writes it."""

import pytest

from ortmodule.triton_kernels.program import KernelStep, StepResult, read_program

TEXT = """rows
operand bfloat16
operand float32
constant float32 3fe0000000000000
step Cast - 0 -> w:float32
step LayerNormalization given0 3 1 -1 -> w:float32 - r:float32
step DropoutTrain draws1 4 -> w:float32
results 4 6
"""


def test_read():
    program = read_program(TEXT)
    assert program.has_rows and program.operands == ("bfloat16", "float32")
    assert program.constants == (("float32", 0.5),)
    assert program.steps == (
        KernelStep("Cast", None, False, (0,), (StepResult(3, "w", "float32"),)),
        KernelStep(
            "LayerNormalization", 0, False, (3, 1, -1),
            (StepResult(4, "w", "float32"), None, StepResult(5, "r", "float32")),
        ),
        KernelStep("DropoutTrain", 1, True, (4,), (StepResult(6, "w", "float32"),)),
    )  # fmt: skip
    assert program.results == (4, 6) and program.n_params == 2 and program.draws
    assert program.types == ("bfloat16", "float32", *["float32"] * 5)


def test_of_elements():
    program = read_program("elements\noperand int64\nstep Neg - 0 -> w:int64\nresults 1\n")
    assert not program.has_rows and not program.draws and program.types == ("int64", "int64")


def test_an_unknown_line():
    with pytest.raises(ValueError, match="a program has no line 'loop 3'"):
        read_program("rows\nloop 3\n")
