"""Turns Triton's interpreter on, which has to be on before Triton is imported."""

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

#: Files that need no Triton: what they test writes its text.
OF_TEXT = {"test_formulas", "test_program", "test_row_steps"}


@pytest.fixture(scope="module", autouse=True)
def triton(request):
    if request.module.__name__.rpartition(".")[2] in OF_TEXT:
        return None
    return pytest.importorskip("triton", reason="the package triton (641 MB) is not installed")
