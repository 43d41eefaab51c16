"""Each block of memory that a training step asks for fails in turn: MemoryError, nothing changed, the next step right.

What plans take from their arenas is failed in tests/c/test_faults.c, one by one."""

import copy
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from ortmodule.optim import FusedAdam

pytestmark = pytest.mark.filterwarnings("error")


class Block(nn.Module):
    """A Transformer block, with a loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x).square().mean()


class Pictures(nn.Module):
    """A convolutional network, with a loss."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.linear = nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.linear(self.pool(self.norm(self.conv(x)).relu()).flatten(1)).square().mean()


CASES = {"transformer": (Block, (2, 5, 16)), "pictures": (Pictures, (2, 3, 8, 8))}


class Steps:
    """Steps of an ORTModule, and the same ones of the module that it is a copy of. ``adds``: to gradients that are
    there."""

    def __init__(self, case, adds):
        make, shape = CASES[case]
        torch.manual_seed(0)
        self.plain, self.x, self.adds = make().train(), torch.randn(shape), adds
        self.model = ORTModule(copy.deepcopy(self.plain))
        self.optimizer, self.plain_optimizer = (FusedAdam(m.parameters(), lr=1e-2) for m in (self.model, self.plain))

    def forward_and_backward(self, model):
        """Whether it came to backward, when it fails."""
        loss = model(self.x)
        self.forward_done = True
        loss.backward()

    def clear(self, model):
        model.zero_grad(set_to_none=not self.adds)
        for p in model.parameters() if self.adds else ():
            p.grad = torch.full_like(p, 0.25)

    def state(self):
        """(parameters, gradients, the optimizer's states; buffers)"""
        params = list(self.model.parameters())
        states = [t for state in self.optimizer.state_dict()["state"].values() for _, t in sorted(state.items())]
        return copy.deepcopy((params, [p.grad for p in params], states)), copy.deepcopy(list(self.model.buffers()))

    def step_both(self):
        """One step of each, from the same states; the results are compared."""
        self.plain.load_state_dict(self.model.state_dict())
        self.plain_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
            self.clear(model)
            self.forward_and_backward(model)
            optimizer.step()
        for (name, ours), theirs in zip(self.model.state_dict().items(), self.plain.state_dict().values(), strict=True):
            # Adam's step of a gradient that is rounding alone is as large as any other
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


def equal(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_allocation_of_a_step(case, adds):
    """Nothing has changed when forward or backward fails, but for buffers where it is backward; the next step is
    PyTorch's."""
    steps = Steps(case, adds)
    steps.step_both()
    failures = of_arenas = 0
    for after in range(1000):
        steps.clear(steps.model)
        steps.forward_done = False
        was, buffers = steps.state()
        _core.fail_memory(after)
        try:
            steps.forward_and_backward(steps.model)
        except MemoryError as error:
            text = str(error)
        else:
            break
        finally:
            _core.fail_memory(-1)
        failures += 1
        assert "out of memory" in text
        of_arenas += bool(re.search(r"a run takes \d+ bytes, which cannot be had; the largest: ([\w ]+ \(.*?\) with "
                                    r"\d+ bytes(, )?){3}$", text))  # fmt: skip
        now, buffers_now = steps.state()
        assert equal(now, was), (after, text)
        assert steps.forward_done or equal(buffers_now, buffers), (after, text)
        steps.step_both()
    assert failures > 5, "nothing of this asks for memory"
    assert of_arenas == 1, "its error names the three largest"
    memory = _core.memory()["used"]
    steps.step_both()
    assert _core.memory()["used"] == memory


class Failing:
    """What failing_malloc.c, preloaded, does to the extension's calls of malloc and the like."""

    def __init__(self):
        self.library = ctypes.CDLL(None)
        self.library.fail_allocations.argtypes = [ctypes.c_long]
        self.library.fail_allocations.restype = ctypes.c_long
        self.library.watch_allocations.argtypes = [ctypes.c_size_t] * 2
        places = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "_core." in line]
        ends = [int(end, 16) for place in places for end in place.split("-")]
        self.library.watch_allocations(min(ends), max(ends))

    def fail(self, after):
        """Returns how many calls there were since the last time."""
        return self.library.fail_allocations(after)


def fail_each_of_a_whole_step(case, failing):
    """Of a step at a batch size that is new, so with its plan; then a step of an old one, whose result is known.
    Returns how many calls failed."""
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = ORTModule(make().train())
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    stepped = []  # batch sizes whose steps came to the optimizer

    def take(rows):
        torch.manual_seed(rows)
        model.zero_grad()
        model(torch.randn(rows, *shape[1:])).backward()
        stepped.append(rows)
        optimizer.step()

    def held():
        return [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]

    take(2), take(3)
    was = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def after_a_known_step():
        model.load_state_dict(was[0])
        optimizer.load_state_dict(copy.deepcopy(was[1]))
        take(3)
        return copy.deepcopy(model.state_dict())

    right, after, done = after_a_known_step(), 0, False
    while not done:
        before = copy.deepcopy(held())
        failing.fail(after)
        try:
            take(4 + after)
        except MemoryError:
            assert failing.fail(-1) > after, "MemoryError, and nothing has failed"
            if 4 + after not in stepped:
                assert equal(held(), before) and all(p.grad is None for p in model.parameters()), after
            after += 1
        else:
            done = failing.fail(-1) <= after
            assert done, f"call {after} failed, and there is no error"
        for name, value in after_a_known_step().items():
            assert torch.equal(value, right[name]), (after, name)
    return after


def main():
    failing = Failing()
    for case in CASES:
        print(case, fail_each_of_a_whole_step(case, failing))


@pytest.mark.emulated_full
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer has its own malloc")
def test_each_call_of_malloc_in_a_whole_step(tmp_path):
    """Plan, forward, backward and optimizer. In a process of its own, which has another malloc."""
    here, library = Path(__file__), tmp_path / "failing_malloc.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", here.with_name("failing_malloc.c"), "-o", library], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "PYTHONPATH": f"{Path(_core.__file__).resolve().parents[1]}:{here.parents[2]}",
        "PYTHONSAFEPATH": "1",
        "ORTMODULE_BUILD": "",
        "OMP_NUM_THREADS": "1",
    }
    program = "from tests.engine.test_failed_allocations import main; main()"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts.keys() == CASES.keys() and all(int(count) > 20 for count in counts.values()), counts
