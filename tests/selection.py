"""Which parameters of a test the ordinary run takes; --full takes all."""

from collections.abc import Callable

import pytest


def each(names, values, short, **options):
    """``pytest.mark.parametrize(names, values)``, where those that are not in ``short`` (a collection, or a function
    of the value) are tested with --full alone."""
    taken = short if isinstance(short, Callable) else short.__contains__

    def param(value):
        marks = () if taken(value) else pytest.mark.full
        return pytest.param(*value, marks=marks) if isinstance(value, tuple) else pytest.param(value, marks=marks)

    return pytest.mark.parametrize(names, [param(value) for value in values], **options)
