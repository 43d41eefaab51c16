"""Tokens are told apart by what they are, and show their names."""

from ortmodule.core.structures import tokens


def test_names():
    found = {name: value for name, value in vars(tokens).items() if name.isupper()}
    assert len(found) > 8 and not any(isinstance(value, type) for value in found.values())
    assert len({repr(value) for value in found.values()}) == len(set(map(id, found.values()))) == len(found)
