"""A hook takes a container that it may change or keep, and not one that it only looks at."""

import functools

import pytest
import torch

from ortmodule.guards.hook_arguments import changeable, takes
from ortmodule.guards.module_hooks import ARGUMENTS, MODULE, NAMED, RESULT

KEPT = []


def keeps_all(module, args):
    KEPT.append(args)


def changes_second(module, args):
    args[1].append(1)


def counts(module, args):
    return len(args)


def reads_first(module, args):
    return args[0] * 2


def scales(factor, module, args):
    return args[0] * factor


def named(module, args, kwargs):
    kwargs["scale"] = 2


def keeps_named(module, args, kwargs):
    KEPT.append(kwargs["cache"])


def of_result(module, args, result):
    result["hidden"] = None


@torch.no_grad()
def wrapped(module, args):
    return args[0] * 2


class Hook:
    def __call__(self, module, args):
        return args[0] * 2


def anything(*args):
    pass


PARTS = (MODULE, ARGUMENTS)
CASES = [
    (keeps_all, PARTS, True), (changes_second, PARTS, True), (reads_first, PARTS, False),
    (counts, PARTS, False), (functools.partial(scales, 2.0), PARTS, False), (wrapped, PARTS, False),
    (Hook(), PARTS, False), (anything, PARTS, True), (print, PARTS, True),
    (functools.partial(reads_first, args=()), PARTS, True), (named, (MODULE, ARGUMENTS, NAMED), False),
    (keeps_named, (MODULE, ARGUMENTS, NAMED), True), (of_result, (MODULE, ARGUMENTS, RESULT), True),
]  # fmt: skip


@pytest.mark.parametrize("hook, parts, taken", CASES, ids=lambda each: getattr(each, "__name__", None))
def test_what_a_hook_takes(hook, parts, taken):
    args, kwargs = (torch.ones(2), [1, 2]), {"cache": {"keys": []}}
    result = {"hidden": torch.ones(2)}
    held = changeable(args, kwargs) | {id(result)}
    assert takes([(hook, parts)], held, args, kwargs, result) is taken


def test_nothing_to_take():
    args = (torch.ones(2), 3)
    assert changeable(args, {}) == frozenset()
    assert not takes([(keeps_all, PARTS)], changeable(args, {}), args, {}, ())


def test_containers_inside_count():
    inner = {"a": [1]}
    assert changeable(((inner,),), {"x": [2]}) >= {id(inner), id(inner["a"])}
