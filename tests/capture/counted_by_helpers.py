"""Numbers that the helpers of tests/capture/test_changes_by_helpers.py keep in a module of their own."""

CALLS = 0
LATEST = {}


class Totals:
    count = 0

    @classmethod
    def add(cls, value):
        cls.count += 1
        LATEST["loss"] = value


def count():
    global CALLS
    CALLS += 1
    return CALLS


def remember(value):
    global MADE  # nothing has this name before
    MADE = value
