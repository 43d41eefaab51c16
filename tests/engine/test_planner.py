"""What backward computes again, or gets back, on small random steps, beside an exact solver's optimum and a bound."""

import random

import pytest

from ortmodule import _core
from tests.selection import each

FORWARD, BACKWARD = 8, 6  # steps
#: A choice costs at most so many times the optimum, and its least peak is at most so many times the least there is.
WORST_COST, WORST_PEAK = 2.0, 1.25
SEEDS = range(60)


class Problem:
    """Steps over values: 0 is given, forward makes 1 to FORWARD, backward gradients of one size."""

    def __init__(self, seed):
        dice = random.Random(seed)
        self.steps, self.bytes = [], [0]
        for v in range(1, FORWARD + 1):
            operands = {max(0, v - dice.choice((1, 1, 1, 2, 3))), *dice.sample(range(v), dice.randint(0, 1))}
            self.steps.append((sorted(operands), [v], float(dice.randint(1, 20)), 0, dice.random() < 0.3))
            self.bytes.append(dice.randint(1, 12))
        gradient = None
        for b in range(BACKWARD):
            near = FORWARD - b * FORWARD // BACKWARD
            operands = {near, *dice.sample(range(1, near + 1), min(near, dice.randint(0, 2)))}
            operands |= set() if gradient is None else {gradient}
            gradient = FORWARD + 1 + b
            self.steps.append((sorted(operands), [gradient], 1.0, 0, False))
            self.bytes.append(2)
        self.held = {0, gradient}

    def chosen(self, target):
        values = [(count, v in self.held) for v, count in enumerate(self.bytes)]
        return _core.recompute(self.steps, values, FORWARD, target)[:5]

    def moved(self, target, moving):
        """Of the choice that may offload, too: (again, offloaded, peak before, peak, cost, bound)."""
        values = [(count, v in self.held) for v, count in enumerate(self.bytes)]
        again, before, peak, cost, bound, offloaded = _core.recompute(self.steps, values, FORWARD, target, moving)
        return again, offloaded, before, peak, cost, bound


class Exact:
    """The same as an integer program: which values are kept, which steps have run again, and what is alive when.

    A *slot* is a step that runs, or one of forward that may run again for one operand of a step of backward.
    """

    def __init__(self, problem, peak=None):
        """``peak``: no more bytes at any time; None: as few as possible."""
        from ortools.sat.python import cp_model

        self.cp, self.m, self.p = cp_model, cp_model.CpModel(), problem
        read = {u for operands, *_ in problem.steps[FORWARD:] for u in operands}
        self.forward = [v for v in range(1, FORWARD + 1) if v not in problem.held]
        self.again = {v: self.m.new_bool_var(f"again{v}") for v in self.forward if v in read}
        self.slots()
        self.peak = self.m.new_int_var(0, sum(problem.bytes) * 2, "peak") if peak is None else peak
        self.memory()
        self.cost = sum(int(problem.steps[x][2]) * self.ran[-1][x] for x in range(FORWARD))
        self.m.minimize(self.cost if peak is not None else self.peak)

    def gone(self, v):
        """Is there, in backward, nothing of what forward has made of it?"""
        return self.again.get(v, 1)

    def both(self, *flags):
        """A variable that is 1 exactly if all of them are."""
        flags = [flag for flag in flags if not (isinstance(flag, int) and flag == 1)]
        if any(isinstance(flag, int) for flag in flags):
            return 0
        if len(flags) < 2:
            return flags[0] if flags else 1
        result = self.m.new_bool_var("")
        self.m.add_min_equality(result, flags)
        return result

    def any_of(self, flags):
        flags = [flag for flag in flags if not (isinstance(flag, int) and flag == 0)]
        if not flags:
            return 0
        if any(isinstance(flag, int) for flag in flags):
            return 1
        result = self.m.new_bool_var("")
        self.m.add_max_equality(result, flags)
        return result

    def slots(self):
        """``order``: [(step, whether it runs, what has run again by then)]; ``ran``: [event][step]."""
        steps = self.p.steps
        self.order = [(x, 1, [0] * FORWARD, False) for x in range(FORWARD)]
        self.ran = [[0] * FORWARD]
        for b in range(FORWARD, len(steps)):
            for v in [u for u in steps[b][0] if u in self.forward]:
                before, now, new = self.ran[-1], [None] * FORWARD, [None] * FORWARD
                for x in reversed(range(FORWARD)):  # readers come after what they read
                    why = [self.gone(v)] if x == v - 1 else []
                    why += [self.both(new[y], self.gone(x + 1)) for y in range(x + 1, FORWARD)
                            if x + 1 in steps[y][0]]  # fmt: skip
                    now[x] = self.any_of([before[x], *why]) if x + 1 in self.forward else 0
                    new[x] = self.difference(now[x], before[x])
                for x in range(FORWARD):
                    by_then = [now[y] if y <= x else before[y] for y in range(FORWARD)]
                    self.order.append((x, new[x], by_then, True))
                self.ran.append(now)
            self.order.append((b, 1, self.ran[-1], False))

    def difference(self, now, before):
        """now and not before."""
        if isinstance(before, int):
            return now if before == 0 else 0
        if isinstance(now, int):
            return self.negated(before) if now else 0
        result = self.m.new_bool_var("")
        self.m.add(result == now - before)
        return result

    def memory(self):
        """At each slot what is alive has at most ``peak`` bytes."""
        alive = [[] for _ in self.order]
        for v in range(1, len(self.p.bytes)):
            if v not in self.p.held:
                self.live(v, alive)
        for (_, runs, *_), terms in zip(self.order, alive, strict=True):
            total = sum(count * flag for count, flag in terms)
            if isinstance(runs, int):
                if runs:
                    self.m.add(total <= self.peak)
            else:
                self.m.add(total <= self.peak).only_enforce_if(runs)

    def live(self, v, alive):
        """Adds to ``alive`` when forward's copy of ``v`` is, and the one that is made again."""
        first = next(i for i, (x, *_) in enumerate(self.order) if v in self.p.steps[x][1])
        backward = v not in self.forward
        copies = [(False, 1 if backward else None)] + ([] if backward else [(True, None)])
        for second, _ in copies:
            later = 0
            for i in reversed(range(first if not second else FORWARD, len(self.order))):
                x, runs, by_then, twice = self.order[i]
                reads = 0
                if v in self.p.steps[x][0]:
                    in_backward = i >= FORWARD
                    there = 1 if not in_backward or backward else self.gone(v) if second else self.negated(self.gone(v))
                    reads = self.both(runs, there) if not (second and not in_backward) else 0
                in_place = self.p.steps[x][4]
                now = self.any_of([later] if in_place else [later, reads])
                made = x + 1 == v and x < FORWARD and twice
                if not second:
                    flag = 1 if i == first else now
                else:
                    born = by_then[v - 1]
                    flag = self.any_of([self.both(born, now), runs if made else 0])
                alive[i].append((self.p.bytes[v], flag))
                later = self.any_of([later, reads])

    def negated(self, flag):
        return 1 - flag if isinstance(flag, int) else flag.negated()

    def solve(self, again=None):
        """(cost, peak) of the best, or with these values made again; None: there is none."""
        for v, flag in self.again.items() if again is not None else ():
            self.m.add(flag == int(v in again))
        solver = self.cp.CpSolver()
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        if solver.solve(self.m) not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None
        return solver.value(self.cost), solver.value(self.peak)


@pytest.fixture(scope="module")
def solver():
    return pytest.importorskip("ortools.sat.python.cp_model", reason="there is no exact solver: pip install ortools")


@each("seed", SEEDS, range(2))
def test_the_choice_is_close_to_the_optimum(seed, solver):
    problem = Problem(seed)
    _, before, least, _, _ = problem.chosen(0)
    best = Exact(problem).solve()[1]
    assert best <= least <= WORST_PEAK * best
    for share in (0.25, 0.6, 1):
        target = int(before - share * (before - least))
        again, _, peak, cost, bound = problem.chosen(target)
        optimum = Exact(problem, target).solve()[0]
        assert bound - 1e-9 <= optimum <= cost <= WORST_COST * optimum and peak <= target


@each("seed", SEEDS, range(2))
def test_the_program_says_what_the_simulation_does(seed, solver):
    problem = Problem(seed)
    for target in (10**6, problem.chosen(0)[1] * 3 // 4, 0):
        again, _, peak, cost, _ = problem.chosen(target)
        assert Exact(problem).solve(again) == (cost, peak)


def test_no_choice_reaches_less_than_there_is():
    problem = Problem(1)
    assert problem.chosen(0)[4] == float("inf")
    assert problem.chosen(10**6) == ([], *[problem.chosen(0)[1]] * 2, 0.0, 0.0)


@pytest.mark.parametrize("steps, values, n_forward, reason", [
    ([([1], [0], 1.0, 0, False)], [(4, False)], 1, "there is no value 1"),
    ([([0], [0], 1.0, 0, False)], [(4, False)], 1, "step 0 reads the value 0, which no earlier step makes"),
    ([], [], 1, "forward cannot have 1 of 0 steps"),
])  # fmt: skip
def test_a_problem_that_is_none(steps, values, n_forward, reason):
    with pytest.raises(ValueError, match=reason):
        _core.recompute(steps, values, n_forward, 0)


# --- offloading -------------------------------------------------------------------------------------------------------


def cost_of(problem, again, offloaded, moving):
    """Of a choice: each step that backward needs once more runs once, and each value comes back once."""
    done, cost = set(), 0.0

    def bring(v):
        nonlocal cost
        gone = v in again or v in offloaded or v not in read
        if v in done or v in problem.held or v > FORWARD or not gone:
            return
        done.add(v)
        cost += moving[v] if v in offloaded else problem.steps[v - 1][2]
        for u in problem.steps[v - 1][0] if v not in offloaded else ():
            bring(u)

    read = {u for operands, *_ in problem.steps[FORWARD:] for u in operands}
    for v in read:
        bring(v)
    return cost


@each("seed", SEEDS, range(4))
def test_what_is_cheap_to_move_is_moved_and_what_is_dear_is_not(seed):
    problem = Problem(seed)
    count, (_, before, least, _, _) = len(problem.bytes), problem.chosen(0)
    again, offloaded, _, lowest, cost, _ = problem.moved(0, [0.0] * count)
    assert again == [] and offloaded and cost == 0 and lowest <= least
    for share in (0.25, 0.6, 1):
        target = int(before - share * (before - least))
        assert problem.moved(target, [1e9] * count)[:2] == (problem.chosen(target)[0], [])
        moving = [2.0 * n for n in problem.bytes]
        again, offloaded, _, peak, cost, bound = problem.moved(target, moving)
        assert peak <= target and bound - 1e-9 <= cost == cost_of(problem, set(again), set(offloaded), moving)


@each("seed", SEEDS, range(4))
def test_a_lower_target_never_costs_less(seed):
    problem = Problem(seed)
    moving = [1.0 + n for n in problem.bytes]
    last = problem.moved(10**6, moving)[3], 0.0
    for target in range(last[0], 0, -1):
        peak, cost = problem.moved(target, moving)[3:5]
        assert peak <= last[0] and cost >= last[1]
        last = peak, cost


@pytest.mark.parametrize("moving, error", [([1.0, 2.0], ValueError), (["x"], TypeError), (1, TypeError)])
def test_costs_of_moving_that_are_none(moving, error):
    with pytest.raises(error):
        _core.recompute([([], [0], 1.0, 0, False)], [(4, False)], 1, 0, moving)
