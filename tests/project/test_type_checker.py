"""Checks that mypy has nothing to say of the package (scripts/check_types.py); it takes a minute of one processor."""

from scripts import check_types


def test_nothing_is_found(capfd):
    found = check_types.main()
    assert found == 0, "".join(capfd.readouterr())
