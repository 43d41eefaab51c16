"""Tests of ortmodule.core.structures.classes: which classes a program has made."""

import collections

import torch

from ortmodule.core.structures import classes


class Derived(dict):
    pass


def test_made_by_a_class_statement():
    for cls in (Derived, torch.nn.Linear, collections.namedtuple("Point", "x")):
        assert classes.is_made_by_statement(cls)
    for cls in (dict, int, torch.Size):
        assert not classes.is_made_by_statement(cls)
