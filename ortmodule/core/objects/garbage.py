"""Collects garbage for certain, and keeps the collector from running by itself.

While another thread collects, gc.collect() does nothing, and says nothing.
"""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE = 0.001  # seconds
_MOST_PAUSES = 1000  # it may be this very thread that collects, further out


class _Circle:
    """Refers to itself: only a collection takes it away."""

    def __init__(self) -> None:
        self.own = self


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, the garbage collector does not run by itself: what finalizers of older garbage do, a progress bar's for
    one, would look like the work of the code that happens to run."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:  # another thread that is inside, too, does not enable it again
            gc.enable()


def collect_garbage(generation: int = 2) -> None:
    """Collects what has become garbage before this call and is of ``generation`` or younger."""
    seen = weakref.ref(_Circle())
    gc.collect(generation)
    for _ in range(_MOST_PAUSES):
        if seen() is None:
            return
        time.sleep(_PAUSE)  # the other thread goes on meanwhile
        gc.collect(generation)
