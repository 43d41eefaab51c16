"""Probes in processes of their own: an operator that aborts or hangs is found, and the others go on."""

import multiprocessing
import threading

import torch

LIMIT = 240  # seconds for an entry


def serve(pipe):
    from tests.probe.trial import Outcome, probe

    torch.set_num_threads(1)
    while True:
        name, dtype, most = pipe.recv()
        try:
            pipe.send(probe(name, getattr(torch, dtype), most))
        except Exception as error:
            pipe.send(Outcome(name, wrong=[f"{type(error).__name__}: {error}"]))


class Worker:
    """A process that probes one entry after the other, and is replaced when it dies or takes too long."""

    def __init__(self):
        self.process = None

    def probe(self, name, dtype, most):
        from tests.probe.trial import Outcome

        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send((name, dtype, most))
        try:
            if self.pipe.poll(LIMIT):
                return self.pipe.recv()
            text = f"took more than {LIMIT} seconds"
        except EOFError:
            self.process.join()
            text = f"the process ended with {self.process.exitcode}"
        self.process.kill()
        self.process.join()
        self.process = None
        return Outcome(name, wrong=[text])

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()


def probe_all(names, dtype="float32", most=None, processes=2, report=lambda outcome: None):
    """Outcomes of these entries by name."""
    waiting, outcomes, lock = list(reversed(names)), {}, threading.Lock()

    def work():
        worker = Worker()
        while True:
            with lock:
                if not waiting:
                    break
                name = waiting.pop()
            outcome = worker.probe(name, dtype, most)
            with lock:
                outcomes[name] = outcome
                report(outcome)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: outcomes[name] for name in names}
