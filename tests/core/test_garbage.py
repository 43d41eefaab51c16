"""What is garbage is collected while another thread collects, which a finalizer can hold up."""

import gc
import threading
import weakref

from ortmodule.core.objects.garbage import collect_garbage


class Circle:
    def __init__(self):
        self.own = self


class Slow(Circle):
    def __init__(self, begun, goes_on):
        super().__init__()
        self.begun, self.goes_on = begun, goes_on

    def __del__(self):
        self.begun.set()
        self.goes_on.wait(10)


def test_while_another_thread_collects():
    begun, goes_on = threading.Event(), threading.Event()
    Slow(begun, goes_on)
    thread = threading.Thread(target=gc.collect)
    thread.start()
    assert begun.wait(10)
    garbage = weakref.ref(Circle())
    gc.collect()
    assert garbage() is not None  # Python does nothing here
    timer = threading.Timer(0.05, goes_on.set)
    timer.start()
    collect_garbage()
    assert garbage() is None
    thread.join(10)


def test_the_young_alone():
    old = weakref.ref(Circle())
    gc.collect(1)
    assert old() is None
    old = [Circle()]
    gc.collect()
    seen = weakref.ref(old.pop())
    young = weakref.ref(Circle())
    collect_garbage(1)
    assert young() is None and seen() is not None
    collect_garbage()
    assert seen() is None


def test_inside_a_collection():
    """From a finalizer: it ends."""

    class Collects(Circle):
        def __del__(self):
            collect_garbage(0)
            done.append(True)

    done = []
    Collects()
    gc.collect()
    assert done == [True]
