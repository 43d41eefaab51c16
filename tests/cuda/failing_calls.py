"""Lets each call of the emulated driver fail in turn.

A test's work ends in an error that names the call, or goes another way.
"""

from ortmodule import _core

#: What is said of a call that failed: of the driver's, and of the libraries whose calls count as its own.
SAID = ("CUDA error 2 in cu", "cuBLASLt error 3 in cublasLt", "cuDNN error")


class FailingCalls:
    """Attempts, in the n-th of which the n-th call fails, until one makes fewer calls than that:

        calls = FailingCalls(driver)
        for attempt in calls:
            ...                 # what comes before
            with attempt:
                ...             # whose calls are counted
            ...                 # nothing fails any more
        assert calls.failures > 5

    ``attempt.error``: the sentence of the error that it ended in, or None. ``attempt.n``: which call was to fail.
    ``calls.failures``: how many attempts ended in an error. ``every``: only each so many-th call.
    """

    def __init__(self, driver, every=1, most=2000):
        self.driver, self.every, self.most = driver, every, most
        self.failures = 0

    def __iter__(self):
        for n in range(1, self.most, self.every):
            attempt = Attempt(self.driver, n)
            yield attempt
            assert attempt.reached is not None, "the test does nothing in the attempt"
            self.failures += attempt.error is not None
            if not attempt.reached:
                return
        raise AssertionError("it fails for ever")


class Attempt:
    def __init__(self, driver, n):
        self.driver, self.n = driver, n
        self.error = self.reached = None

    def __enter__(self):
        self.driver.fake_fail_at(self.n)
        return self

    def __exit__(self, kind, error, traceback):
        self.reached = self.driver.fake_calls() >= self.n
        self.driver.fake_fail_at(0)
        if not isinstance(error, (_core.Error, MemoryError)):
            return False
        assert any(each in str(error) for each in SAID), error
        self.error = str(error)  # not the error itself, which would hold what the work has made
        return True
