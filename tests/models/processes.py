"""Runs each subject in a process of its own, with limits: one that aborts or hangs ends alone.

The limits are on time and memory.
"""

import multiprocessing
import resource
import threading
import time

import torch

SECONDS, BYTES = 240, 8 << 30


def _work(name, pipe, seconds):
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    from tests.models.subjects import subject
    from tests.models.trial import UNBUILT, Outcome, attempt, general

    start = time.perf_counter()
    try:
        found = subject(name)
    except Exception as error:
        outcome = Outcome(name, state=UNBUILT, reason=general(f"{type(error).__name__}: {error}"))
    else:
        outcome = attempt(name, found)
    outcome.seconds = round(time.perf_counter() - start, 1)
    pipe.send(outcome)


def run(name, context, seconds=SECONDS):
    """The outcome of one subject."""
    from tests.models.trial import UNBUILT, WRONG, Outcome

    pipe, theirs = context.Pipe()
    process = context.Process(target=_work, args=(name, theirs, seconds))
    process.start()
    theirs.close()
    state, text = UNBUILT, f"took more than {seconds} seconds"  # of a slow machine, or for ever: nothing is known
    try:
        if pipe.poll(seconds):
            return pipe.recv()
    except EOFError:
        process.join()
        state, text = WRONG, f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Outcome(name, state=state, reason=text)


def run_all(names, workers=2, report=lambda outcome: None, seconds=SECONDS):
    """Outcomes of these subjects by name; ``report`` is called with each as it comes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.preload"])
    waiting, outcomes, lock = list(reversed(names)), {}, threading.Lock()

    def work():
        while True:
            with lock:
                if not waiting:
                    return
                name = waiting.pop()
            outcome = run(name, context, seconds)
            with lock:
                outcomes[name] = outcome
                report(outcome)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: outcomes[name] for name in names}
