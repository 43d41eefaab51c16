"""Names that packages share fit each other, and fit the package."""

from pathlib import Path

import onnx

import ortmodule
from ortmodule.core import names


def test_opsets():
    assert names.DEFAULT_OPSET in names.OPSETS and names.OPSETS.start > names.OLDEST_OPSET
    assert names.OPSETS.stop - 1 <= onnx.defs.onnx_opset_version()


def test_the_folder():
    assert Path(names.PACKAGE) == Path(ortmodule.__file__).parent


def test_kinds_of_inputs_are_told_apart():
    assert not names.INPUT.startswith(names.STATE) and not names.STATE.startswith(names.INPUT)
