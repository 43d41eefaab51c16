"""Shares the tests between two processes of pytest: one begins with the first, the other with the last.

Both are told of one file (--from-front FILE, --from-back FILE), in which they write what they have begun.
"""

import fcntl
from pathlib import Path

import pytest


class BothEnds:
    """Runs those of the tests that the other process has not begun. Tests of one ``group_of(item)`` are not divided."""

    def __init__(self, path, backwards, group_of):
        self.path, self.backwards, self.group_of = Path(path), backwards, group_of
        self.read = 0  # bytes of the file
        self.ours, self.others = set(), set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        groups = {}
        for item in items:
            groups.setdefault(self.group_of(item), []).append(item)
        order = reversed(groups.values()) if self.backwards else groups.values()
        items[:] = [item for group in order for item in group]

    def begin(self, group):
        """Whether the group is ours: the other process has not begun it."""
        with self.path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.seek(self.read)
            self.others.update(file.read().splitlines())
            if group not in self.others:
                file.write(f"{group}\n")
                self.ours.add(group)
            self.read = file.tell()
        return group in self.ours

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        group = ascii(self.group_of(item))  # one line
        if group in self.ours or group not in self.others and self.begin(group):
            return None
        return True  # it has been run, for all that pytest knows
