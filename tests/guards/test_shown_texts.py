"""Text that is only shown is told from text that code goes on with."""

import logging
import sys
import warnings

import pytest
import torch

from ortmodule.guards.reads.shown_texts import is_shown

found = []


class Text:
    """Notes where a text is made of it."""

    def __format__(self, spec):
        found.append(is_shown(sys._getframe(1)))
        return "text"

    def __str__(self):
        found.append(is_shown(sys._getframe(1)))
        return "text"


class Holder:
    log = logging.getLogger("tests.shown")
    seen = []


def logged(n):
    Holder.log.warning(f"n is {n}")


def logged_late(n):
    Holder.log.error("n is %s", n)


def printed(n):
    print(n, f"{n}!", file=sys.stderr)


def warned(n):
    warnings.warn(f"n is {n}", stacklevel=2)


def asserted(n):
    torch._assert(True, f"n is {n}")


def raised(n):
    raise ValueError("n is " + str(n))


def named(n):
    name = f"mask_{n}"
    return name


def returned(n):
    return str(n)


def compared(n):
    if f"{n}" == "4":
        return 2
    return 3


def added(n):
    Holder.seen.append(f"{n}")


def found_by(n):
    return getattr(Holder, f"a{n}", 5)


def key(n):
    return {"4": 2}.get(str(n))


def set_under(n):
    setattr(Holder, f"mask_{n}", 3)


SHOWN = (logged, logged_late, printed, warned, asserted, raised)
USED = (named, returned, compared, added, found_by, key, set_under)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", SHOWN + USED)
def test_text(function):
    found.clear()
    try:
        function(Text())
    except ValueError:
        assert function is raised
    assert found and all(each == (function in SHOWN) for each in found)
