"""Ten thousand steps over random lengths, whose plans come and go, take no more memory than two thousand."""

import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ortmodule import ORTModule
from ortmodule.engine.plan_cache import MOST_PLANS

LENGTHS, EVERY = 200, 20  # more than there are plans; steps between two looks at the memory
assert LENGTHS > MOST_PLANS


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, ids):
        return self.head(nn.functional.gelu(self.norm(self.words(ids)))).square().mean()


def resident():
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def train(steps):
    """Bytes of the process in each thousand of steps, in the mean, and how many plans were made."""
    draw, model = random.Random(0), ORTModule(Tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps):
        model(torch.randint(0, 11, (2, draw.randint(1, LENGTHS)))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            found.append(resident())
    each = 1000 // EVERY
    graph = model._ortmodule.latest
    assert len(graph.session.plans) <= MOST_PLANS and len(graph.executables.plans) <= MOST_PLANS
    return [sum(found[i : i + each]) / each for i in range(0, len(found), each)], graph.session.plans_made


def main(steps):
    gc.collect()
    bytes_of, plans = train(int(steps))
    print(plans, *map(round, bytes_of))


@pytest.mark.full
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps what is freed")
def test_memory_is_flat_over_random_lengths():
    """In a process of its own: what other tests have left would hide it."""
    command = [sys.executable, "-W", "ignore", "-c", "from tests.engine.test_long_training import main; main(10_000)"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    plans, *thousands = map(int, done.stdout.split())
    assert plans > 1000, "plans came and went"
    assert len(thousands) == 10 and abs(thousands[-1] / thousands[1] - 1) < 0.02, thousands
