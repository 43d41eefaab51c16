"""Lists every case in one of its types, for tests that are not about types."""

import zlib

import pytest

from tests.ops.cases import FAMILIES


def one_type(case):
    """Which of a case's types is taken; over the cases of an operator, most of its types."""
    return case.dtypes[zlib.crc32(case.label.encode()) % len(case.dtypes)]


#: Parameters of a test: every case in one of its types. Those of real size wait for --full.
IN_ONE_TYPE = [
    pytest.param(
        case,
        one_type(case),
        id=f"{family}-{case.label}-{one_type(case)}",
        marks=[pytest.mark.full] * ("64x56x56" in case.label),
    )
    for family, cases in FAMILIES.items()
    for case in cases
]
