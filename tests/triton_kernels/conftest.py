"""Turns Triton's interpreter on, which has to be on before Triton is imported."""

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def triton():
    return pytest.importorskip("triton", reason="the package triton (641 MB) is not installed")
