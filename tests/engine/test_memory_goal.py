"""A budget counts what a step holds in any case, and refuses one that leaves nothing."""

import pytest

from ortmodule.engine import memory_goal
from ortmodule.engine.memory_goal import MemoryGoal, bytes_of, segment_bytes

NAMES = ["state/weight", "input/0", "state/table"]
SPECS = [("float32", (10, 10)), ("float32", (5,)), ("int64", (4,))]
NEEDS = [True, False, False]
HELD = 400 + 20 + 32 + 400  # the inputs, and the gradient of one


def test_bytes():
    assert [bytes_of(spec) for spec in SPECS] == [400, 20, 32]
    assert bytes_of(("bfloat16", (3, 0))) == 0 and bytes_of(("float64", ())) == 8


def test_without_a_budget():
    assert MemoryGoal(2, 0).of(NAMES, SPECS, NEEDS) == (2, 0)
    assert not MemoryGoal(2, 0).chooses and MemoryGoal(0, 1).chooses and MemoryGoal(0, 0, joint_from=1).chooses


def test_what_is_left_of_a_budget():
    assert MemoryGoal(0, 1000).of(NAMES, SPECS, NEEDS) == (0, 1000 - HELD)
    assert MemoryGoal(1, 1000, beside=48).of(NAMES, SPECS, NEEDS) == (1, 1000 - HELD - 48)


def test_gradients_that_are_added_are_there_twice():
    assert MemoryGoal(0, 2000).of(NAMES, SPECS, NEEDS, adds=True) == (0, 2000 - HELD - 400)
    assert MemoryGoal(0, 2000, in_segments=False).of(NAMES, SPECS, NEEDS, adds=True) == (0, 2000 - HELD - 400)
    big = [("float32", (memory_goal.SEGMENT_BYTES // 8,))] * 8  # half a segment each
    names, needs, budget = [f"state/{i}" for i in range(8)], [True] * 8, 1 << 34
    at_once, in_segments = (
        MemoryGoal(0, budget, in_segments=which).of(names, big, needs, adds=True)[1] for which in (False, True)
    )
    assert in_segments - at_once == 4 * memory_goal.SEGMENT_BYTES - 1.5 * memory_goal.SEGMENT_BYTES


@pytest.mark.parametrize("budget", [1, HELD])
def test_a_budget_that_leaves_nothing(budget):
    with pytest.raises(MemoryError, match=f"take {HELD} bytes.*the largest: weight with 400 bytes, table with 32"):
        MemoryGoal(0, budget).of(NAMES, SPECS, NEEDS)


def test_segments():
    assert segment_bytes(1) == memory_goal.SEGMENT_BYTES
    assert segment_bytes(1 << 40) == (1 << 40) // memory_goal.MOST_SEGMENTS
