"""Collects garbage, also where another thread is collecting: then gc.collect() does nothing, and says nothing."""

import gc
import time
import weakref

_PAUSE = 0.001  # seconds
_MOST_PAUSES = 1000  # it may be this very thread that collects, further out


class _Circle:
    """Refers to itself: only a collection takes it away."""

    def __init__(self) -> None:
        self.own = self


def collect_garbage(generation: int = 2) -> None:
    """Collects what has become garbage before this call and is of ``generation`` or younger."""
    seen = weakref.ref(_Circle())
    gc.collect(generation)
    for _ in range(_MOST_PAUSES):
        if seen() is None:
            return
        time.sleep(_PAUSE)  # the other thread goes on meanwhile
        gc.collect(generation)
