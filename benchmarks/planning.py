"""Measures how long planning a step of 24 layers takes: nothing asked, MEMORY_OPT_LEVEL, a budget.

    python -m benchmarks.planning                            BERT-large phase 1, GPT-2 medium
    python -m benchmarks.planning --rows bert-large --times 9

Each row is captured once on the meta device; then its step is planned anew, as for a shape that was never seen. No step
runs. The budgets lie between a step that keeps all and the least that can be reached.
"""

import argparse
import time
from statistics import median

from benchmarks.alive import kind_of, step_of
from benchmarks.rows import EVERY
from ortmodule.engine.memory_goal import ALL_AGAIN, LAYERS_AGAIN, MemoryGoal

ROWS = ("bert-large-phase-1", "gpt2-medium")
KEEPS_ALL = MemoryGoal(0, 1 << 62)


def seconds_of(step, goal, times):
    """The median of so many plans, the slowest, and one of them."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        plan = step.plan(goal)
        taken.append(time.perf_counter() - start)
    return median(taken), max(taken), plan


def goals_of(step):
    """{title: goal}"""
    most, least = (p.total - p.optimizer for p in (step.peak(KEEPS_ALL), step.peak(MemoryGoal(ALL_AGAIN, 0))))
    return {
        "nothing asked": MemoryGoal(0, 0),
        "`MEMORY_OPT_LEVEL=1`": MemoryGoal(LAYERS_AGAIN, 0),
        "`MEMORY_OPT_LEVEL=2`": MemoryGoal(ALL_AGAIN, 0),
        "a budget, half way": MemoryGoal(0, (most + least) // 2),
        "a budget, nearly the least": MemoryGoal(0, least + (most - least) // 20),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(EVERY), metavar="ROW")
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    print("| model | type | asked | seconds: median | most | instructions | plan, MB |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for key in args.rows:
        for autocast in (False, True):
            step = step_of(key, autocast)
            for title, goal in goals_of(step).items():
                middle, most, plan = seconds_of(step, goal, args.times)
                size = f"{sum(plan.nodes)} | {plan.host_bytes / 1e6:.1f}"
                row = f"{EVERY[key].title} | {kind_of(autocast)} | {title} | {middle:.3f} | {most:.3f} | {size}"
                print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
