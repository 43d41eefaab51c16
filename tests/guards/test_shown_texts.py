"""Text that is only shown is told from text that code goes on with."""

import logging
import sys
import warnings

import pytest
import torch

from ortmodule.guards.reads.shown_texts import is_shown, is_written

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


def kept_for_an_error(n):
    text = f"n is {n}, of {Holder.seen}, {len('abc')}"
    if Holder.seen == [3]:
        raise ValueError(text)
    if Holder.seen == [4]:
        print(text)


def kept_for_a_log(n):
    text = f"n is {n}"
    text = text + "!"
    if Holder.seen:
        Holder.log.error(text)


def unused(n):
    text = f"n is {n}, {Holder.seen}"  # noqa: F841


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


def kept_and_compared(n):
    text = f"{n}"
    if text == "4":
        raise ValueError(text)


def kept_and_given(n):
    text = f"{n}"
    added(text)


def kept_and_found_by(n):
    found = {"text": 2}[f"{n}"]
    Holder.log.debug(found)


def result_kept(n):
    found = Holder.seen.append(f"{n}")  # noqa: F841


def kept_for_all(n):
    text = f"{n}"  # noqa: F841
    return locals()


def kept_inside(n):
    text = f"{n}"
    return lambda: text


SHOWN = (logged, logged_late, printed, warned, asserted, raised, kept_for_an_error, kept_for_a_log, unused)
USED = (named, returned, compared, added, found_by, key, set_under, kept_and_compared, kept_and_given,
        kept_and_found_by, result_kept, kept_for_all, kept_inside)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", SHOWN + USED)
def test_text(function):
    found.clear()
    try:
        function(Text())
    except ValueError:
        assert function is raised
    assert found and all(each == (function in SHOWN) for each in found)


class Number:
    """Notes where it is written into a text, as a number."""

    def __int__(self):
        found.append(is_written(sys._getframe(1)))
        return 3


def written_for_an_error(n):
    text = "n is %d" % n  # noqa: UP031
    if Holder.seen == [3]:
        raise ValueError(text)


def written_to_a_log(n):
    Holder.log.warning("n is %d, %s" % (n, 2))  # noqa: UP031


def written_and_returned(n):
    return "%d" % n  # noqa: UP031


def converted(n):
    Holder.log.warning(int(n) % 5)


@pytest.mark.parametrize("function", (written_for_an_error, written_to_a_log, written_and_returned, converted))
def test_number_in_a_text(function):
    found.clear()
    function(Number())
    assert found == [function in (written_for_an_error, written_to_a_log)]
