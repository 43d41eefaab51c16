"""Fuzzes threads that replay CUDA graphs of plans that they share, on an emulated GPU.

They plan, run, show, profile, tune and let go of plans beside it.

python -m tests.fuzz.replay [--seconds S] [NUMBER...]
"""

import copy
import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from ortmodule import _core
from tests.cuda.test_emulated import library
from tests.cuda.test_graphs import Step, aligned, same
from tests.fuzz.loop import main

SEEDS = range(4)
SHAPES = [(9, 17, 5), (3, 4, 8), (1, 33, 2), (16, 8, 16)]


class Shared:
    """Plans of one model, one for each shape, and what one thread alone gets from them."""

    def __init__(self, shapes):
        self.steps = [Step(shape=shape) for shape in shapes]
        self.expected = [{seed: step.run(seed, graphs=False) for seed in SEEDS} for step in self.steps]


class Worker:
    """A thread's own memory for the shared plans: recordings are of its addresses."""

    def __init__(self, shared, actions):
        self.shared, self.actions, self.mine = shared, actions, []
        for step in shared.steps:
            own = copy.copy(step)
            own.arena, own.y, own.dy = aligned(step.plan.arena_bytes), step.y.clone(), step.dy.clone()
            own.grads = [torch.empty_like(grad) for grad in step.grads]
            self.mine.append(own)

    def run(self):
        for action, which, seed in self.actions:
            getattr(self, action)(which, seed)

    def check(self, results, which, seed, way):
        for ours, theirs in zip(results, self.shared.expected[which][seed], strict=True):
            assert torch.allclose(ours, theirs, 1e-4, 1e-5), f"{way} of plan {which} with the seed {seed} differs"

    def replay(self, which, seed):
        for _ in range(3):  # the second records
            self.check(self.mine[which].run(seed), which, seed, "a replay")

    def launch(self, which, seed):
        self.check(self.mine[which].run(seed, graphs=False), which, seed, "a run")

    def plan(self, which, seed):
        """A plan of its own, with its recordings, which go with it."""
        step = Step(shape=SHAPES[seed])
        results = [step.run(seed) for _ in range(3)]
        assert same(results[0], results[2]), "a replay is not its run"

    def show(self, which, seed):
        plan = self.shared.steps[which].plan
        assert plan.text() and plan.onnx() and plan.code() and len(plan.graphs) == 3

    def profile(self, which, seed):
        self.shared.steps[which].plan.profile(seed % 2 == 0)

    def tune(self, which, seed):
        plan = self.shared.steps[which].plan
        needed = _core.cuda_tune(plan, 0, 1e-5, None, 0, True, True)[0]
        if needed:
            _core.cuda_tune(plan, 0, 1e-5, aligned(needed), 0, True, True)

    def allocate(self, which, seed):
        _core.empty(torch.Tensor, "uint8", (3 << 20,))
        _core.memory()


ACTIONS = ["replay", "replay", "replay", "launch", "plan", "show", "profile", "tune", "allocate"]


def case(draw):
    fake = library("libcuda.so.1")
    fake.fake_complaint.restype = ctypes.c_char_p
    fake.fake_fail_at(0)
    shared = Shared(draw.sample(SHAPES, draw.randint(1, 2)))
    workers = [
        Worker(
            shared,
            [
                (draw.choice(ACTIONS), draw.randrange(len(shared.steps)), draw.choice(SEEDS))
                for _ in range(draw.randint(1, 6))
            ],
        )
        for _ in range(draw.randint(2, 4))
    ]
    with ThreadPoolExecutor(len(workers)) as pool:
        for done in [pool.submit(worker.run) for worker in workers]:
            done.result()
    assert fake.fake_complaint() == b""


if __name__ == "__main__":
    sys.exit(main(case, "replay", __doc__))
