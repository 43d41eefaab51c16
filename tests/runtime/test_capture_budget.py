"""Captures take a share of the time in steps: what waits for a graph, and what always runs."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from ortmodule import Config, ORTModule, explain
from ortmodule.core.errors import Cause, NotInEngine, Waits
from ortmodule.core.logger import Log, LogLevel
from ortmodule.runtime.calls import capture_budget
from ortmodule.runtime.calls.capture_budget import MOST_CHANGES, Budget


class Clock:
    """Stands still until it is told to go on. It is the timer, too, which calls what is due at the end."""

    def __init__(self):
        self.now, self.due = 0.0, {}

    def __call__(self):
        return self.now

    def timer(self, seconds, function):
        clock, due = self, self.now + seconds

        class Timer:
            daemon = False

            def start(self):
                clock.due[self] = due, function

            def cancel(self):
                clock.due.pop(self, None)

        return Timer()

    def go(self, seconds):
        self.now += seconds
        for timer in [timer for timer, (due, _) in self.due.items() if due <= self.now]:
            self.due.pop(timer)[1]()


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(capture_budget, "clock", found)
    monkeypatch.setattr(capture_budget, "Timer", found.timer)
    monkeypatch.delenv("ORTMODULE_CAPTURE_SHARE", raising=False)
    return found


# --- arithmetic -------------------------------------------------------------------------------------------------------


class Calls:
    """A budget, and calls with a capture of two seconds, PyTorch's steps of two and the engine's of one."""

    def __init__(self, clock, share=0.1, bounded=True):
        self.clock, self.budget = clock, Budget(share, bounded, Log("Model", LogLevel.WARNING))
        self.graphs, self.warnings = set(), []

    def __call__(self, name, mode="train", fails=False, capture=2.0):
        """Whether the engine runs it."""
        budget = self.budget
        if name not in self.graphs:
            variant = budget.variant(name, lambda: (f"model.py:7 found {name}", "model.py:7"), 10)
            try:
                budget.ask(variant, mode)
                with budget.capturing(variant):
                    self.clock.go(capture)
                    if fails:
                        raise NotInEngine(Cause.TORCH_MODEL, "it fails")
            except NotInEngine as reason:
                self.warnings += [reason.warning] if reason.warning else []
                budget.in_pytorch(lambda: self.clock.go(2.0), (), {}, reason)
                return False
            self.graphs.add(name)
            self.graphs_of = {variant.what: variant for variant in budget.graphs}
        variant = self.graphs_of[f"model.py:7 found {name}"]
        self.clock.go(1.0)
        variant.runs += 1
        variant.seconds += 1.0
        variant.used = self.clock.now
        return True


def test_the_first_graph_is_captured_at_once(clock):
    assert all(Calls(clock)("a") for _ in range(3))


def test_each_mode_has_its_first_graph(clock):
    calls = Calls(clock)
    assert calls("a") and calls("b", "evaluation") and not calls("c") and not calls("d", "evaluation")
    assert calls.budget.first == 4.0 and calls.budget.bounded_seconds == 0.0


def test_another_variant_waits_until_the_share_is_large_enough(clock):
    calls, steps = Calls(clock), 0.0
    assert calls("a")
    steps += 1.0
    while not calls("b"):
        steps += 2.0
        assert steps < 100
    assert steps >= 2.0 / 0.1  # a capture of two seconds is a tenth of them
    assert calls.budget.bounded_seconds <= 0.1 * calls.budget.steps


def test_a_variant_that_seldom_comes_waits_although_there_is_room(clock):
    calls = Calls(clock)
    for _ in range(1000):
        assert calls("a")
    assert not calls("b")
    assert not calls("b")  # a half of four seconds is what the capture takes
    assert calls("b")


def test_what_comes_once_is_never_captured(clock):
    calls = Calls(clock)
    assert calls("a")
    assert not any(calls(number) for number in range(2000))
    assert calls("a") and len(calls.budget.waiting) == capture_budget.MOST_WAITING
    assert calls.budget.steps == 2 * 1.0 + 2000 * 2.0  # those that are forgotten count


def test_captures_never_take_more_than_their_share(clock):
    calls = Calls(clock)
    for step in range(3000):
        calls(step % 24)
        # A capture is allowed by what captures took so far, and these all take as long.
        assert calls.budget.bounded_seconds <= 0.1 * calls.budget.steps + 1e-9
    assert len(calls.graphs) > 10


def test_what_took_longer_than_expected_is_paid_back(clock):
    calls = Calls(clock)
    calls("a")
    while not calls("b", capture=20.0):
        pass
    while not calls("c"):
        assert calls.budget.steps < 1000
    assert calls.budget.bounded_seconds <= 0.1 * calls.budget.steps and calls.budget.steps > 220


def test_variants_that_have_a_graph_run(clock):
    calls = Calls(clock)
    found = [calls(name) for name in "a" + 20 * "b" + "cbacba"]
    assert found[-6:] == [False, True, True, False, True, True]


def test_failed_attempts_count(clock):
    calls = Calls(clock)
    assert calls("a")
    while calls.budget.captures == 1:
        calls("b", fails=True)
    assert calls.budget.bounded_seconds == 2.0
    steps = calls.budget.steps
    while not calls("b"):
        assert calls.budget.steps < 1000
    assert calls.budget.steps >= steps + 2.0 / 0.1 - 2.0


def test_until_its_first_graph_a_mode_may_fail_for_some_time(clock):
    calls = Calls(clock)
    assert not any(calls(name, fails=True) for name in "abcdefgh")
    assert calls.budget.captures == capture_budget.UNBOUNDED_SECONDS / 2.0
    assert not calls("i") and calls.budget.captures == 5  # captures have had their share


def test_no_bound(clock):
    calls = Calls(clock, share=float("inf"))
    assert all(calls(name) for name in range(20))


def test_no_share(clock):
    calls = Calls(clock, share=0.0)
    assert calls("a") and not any(calls("b") for _ in range(100))


def test_where_pytorch_must_not_run_there_is_no_bound(clock):
    calls = Calls(clock, bounded=False)
    assert all(calls(name) for name in range(20))


def test_parts_that_fail_one_after_the_other(clock):
    """Each starts all traces again: after some seconds the rest waits, and goes on where it was."""
    budget = Budget(0.1, True, Log("Model", LogLevel.WARNING))
    variant = budget.variant("a", lambda: ("its first call", ""), 10)
    passes = 0

    def attempt():
        nonlocal passes
        budget.ask(variant, "train")
        with budget.capturing(variant):
            while passes < 8:
                passes += 1
                clock.go(2.0)
                budget.go_on("layer.3 fails")

    with pytest.raises(Waits, match="capturing has taken 10.0 s, and goes on after more steps: layer.3 fails"):
        attempt()
    assert passes == 5
    with pytest.raises(Waits):
        attempt()
    assert passes == 5
    reason = Waits(variant, "", "")
    while passes < 8:
        budget.in_pytorch(lambda: clock.go(2.0), (), {}, reason)
        with contextlib.suppress(Waits):
            attempt()
        assert budget.bounded_seconds <= 0.1 * budget.steps + capture_budget.UNBOUNDED_SECONDS
    assert budget.seconds == 16.0


def test_deterministic_algorithms_leave_nothing_to_the_clock(clock):
    def found():
        calls = Calls(clock)
        clock.go(clock.now)  # at another time
        return [calls(name) for name in "a" + 40 * "b"]

    torch.use_deterministic_algorithms(True)
    try:
        assert found() == [True, *[False] * capture_budget.OFTEN, *[True] * (40 - capture_budget.OFTEN)] == found()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_warning_for_each_place(clock):
    calls = Calls(clock)
    calls("a")
    for _ in range(5):
        calls("b"), calls("c")
    (warning,) = calls.warnings
    assert "model.py:7 found b" in warning and "explain()" in warning and "ORTMODULE_CAPTURE_SHARE" in warning


def test_gain(clock):
    calls = Calls(clock)
    for name in "a" + 30 * "b":
        calls(name)
    budget = calls.budget
    first, second = budget.graphs
    # PyTorch has run no call of the first, but calls as large.
    assert budget.pytorch_seconds(first) == 2.0 * first.runs and budget.pytorch_seconds(second) == 2.0 * second.runs
    assert budget.saved == 0.5


def test_a_long_capture_says_that_it_goes_on(clock, caplog):
    calls = Calls(clock)
    calls("a", capture=capture_budget.LONG - 1)
    assert not caplog.messages and not clock.due
    calls("b", "evaluation", capture=capture_budget.LONG + 60)
    (message,) = caplog.messages
    assert message.startswith("Model: capturing has taken 5 s so far (model.py:7 found b)")


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "given, grad, text",
    [
        (torch.ones(2, 3, dtype=torch.float64), True, "input 0 is float64 with 2 dimensions, and float32 with 2"),
        (
            torch.ones(2, 3, requires_grad=True),
            True,
            "input 0 is float32 with 2 dimensions and a gradient, and float32",
        ),
        (torch.ones(2, 3), False, "the grad mode is False, and True in the graph that there is"),
    ],
)
def test_a_sentence_says_what_differs(given, grad, text):
    model = ORTModule(Doubled(), config=Config(capture_share=float("inf")))
    model(torch.ones(2, 3))
    with torch.set_grad_enabled(grad):
        model(given)
    assert [v.what for v in explain(model).variants if v.what.startswith(text)]


# --- a module ---------------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """Takes as many steps as its data says, which take the clock a second each."""

    def __init__(self, clock):
        super().__init__()
        self.linear, self.clock, self.scale = nn.Linear(4, 4), lambda: clock, 1.0

    def forward(self, x, factor=1.0):
        y = self.linear(x) * self.scale
        for _ in range(int(x[:, 0].max())):
            y = y.sin()
        if torch._C._get_tracing_state() is None:
            self.clock().go(1.0)
        return y * factor


def rows(steps, length=3):
    x = torch.full((length, 4), 0.5)
    x[:, 0] = steps
    return x


def run(module, *args, **kwargs):
    """Whether the engine ran it; the result and the gradients are compared with PyTorch's."""
    eager = module._ortmodule.module
    expected, found = eager(*args, **kwargs), module(*args, **kwargs)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().sum(), eager.linear.weight)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)
    return explain(module).captured


@pytest.fixture
def module(clock, monkeypatch):
    """Its captures take the clock a second for each graph, and one for the check beside PyTorch."""
    torch.manual_seed(0)
    found = ORTModule(Steps(clock))
    compiler = found._ortmodule.compiler
    compile_, failing = compiler.compile, []

    def slow(call, part):
        graph = None if failing else compile_(call, part)
        clock.go(1.0)
        if failing:
            raise NotInEngine(Cause.TORCH_MODEL, "it fails")
        return graph

    monkeypatch.setattr(compiler, "compile", slow)
    found._ortmodule.failing = failing
    return found


@pytest.mark.filterwarnings("ignore")
def test_waiting_then_captured(module):
    assert run(module, rows(1)) and run(module, rows(1))
    calls = 0
    while not run(module, rows(2)):
        calls += 1
        assert calls < 100
    assert calls > 5
    assert all(run(module, rows(steps)) for steps in (1, 2, 1, 2))
    assert not run(module, rows(3)) and run(module, rows(2)) and run(module, rows(1))


@pytest.mark.filterwarnings("ignore")
def test_what_explain_lists(module):
    run(module, rows(1))
    while not run(module, rows(2)):
        pass
    run(module, rows(5))
    report = explain(module)
    assert [variant.captured for variant in report.variants] == [True, True, False]
    second, third = (next(v for v in report.variants if f"found {n}" in v.what) for n in (2, 5))
    assert "test_capture_budget.py:" in second.what and second.capture_seconds == 2.0 and second.runs == 1
    assert second.gain_seconds is not None and third.waited == 1 and third.pytorch_seconds == 1.0
    assert report.first_capture_seconds == 2.0 and report.capture_seconds == 4.0
    text = str(report)
    assert (
        "waits, 1 calls in PyTorch (1.00 s): " in text and "found 5, and" in text and "captures   took 4.00 s" in text
    )


def test_the_warning_names_line_and_value(module):
    run(module, rows(1))
    with pytest.warns(UserWarning) as caught:
        run(module, rows(2)), run(module, rows(3)), run(module, rows(4))
    (text,) = {str(warning.message) for warning in caught}
    assert "test_capture_budget.py:" in text and "found 2, and 1 when it was traced" in text
    assert "explain() lists what waits, ORTMODULE_CAPTURE_SHARE sets" in text


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_does_not_hold_is_found_out_early(module, monkeypatch):
    """Only what is read is computed of a graph that often does not hold, and once for all graphs that read the same."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    module = ORTModule(module._ortmodule.module)
    for steps in (1, 2, 3, 4):
        assert run(module, rows(steps))
    (graphs,) = module._ortmodule.graphs.values()
    before = [graph.missed for graph in graphs]
    assert run(module, rows(1))
    assert sum(graph.missed for graph in graphs) == sum(before) + 1  # each has read another number
    assert run(module, rows(1)) and graphs[0].missed == before[0] + 2 and graphs[0]._reads.early is not None


@pytest.mark.parametrize(
    "change, what",
    [
        (
            lambda module: run(module, rows(1, length=7).double().float().requires_grad_()),
            "and a gradient, and float32 with",
        ),
        (lambda module: run(module, rows(1), factor=2.0), "its arguments are 1 tensors and 2.0"),
        (lambda module: setattr(module, "scale", 3.0) or run(module, rows(1)), "the attribute scale is 3.0 now"),
        (lambda module: module.linear.eval() and run(module, rows(1)), "linear.training is False"),
        (lambda module: module.linear.bias.requires_grad_(False) is None or run(module, rows(1)), "requires_grad of"),
    ],
    ids=["type", "number", "attribute", "mode", "parameter"],
)
def test_what_splits_calls(module, change, what):
    run(module, rows(1))
    with pytest.warns(UserWarning, match="PyTorch runs some calls"):
        assert not change(module)
    assert what in explain(module).variants[-1].what


@pytest.mark.filterwarnings("ignore")
def test_an_attribute_that_fails_at_each_value(module):
    """Attempts in spite of failures are bounded as graphs are."""
    run(module, rows(1))
    owner = module._ortmodule
    owner.failing.append(True)
    for step in range(60):
        module.scale = 2.0 + step
        assert not run(module, rows(1))
    assert owner.budget.bounded_seconds <= 0.1 * owner.budget.steps + 1.0
    owner.failing.clear()
    module.scale = 1.0
    assert run(module, rows(1))


@pytest.mark.filterwarnings("ignore")
def test_numbers_among_the_arguments_become_operands_when_it_pays(module):
    assert run(module, rows(1), 0.5)
    found = [run(module, rows(1), 0.5 + step) for step in range(1, 40)]
    assert not found[0] and found[-1] and found == sorted(found)
    assert explain(module).exports == 2


def test_pytorchs_backward_is_counted(clock):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            clock.go(3.0)
            return grad

    x = torch.ones(2, requires_grad=True)
    for wrap in (lambda y: y, lambda y: (1, y), lambda y: {"loss": y}, lambda y: [y, y]):
        budget = Budget(0.1, True, Log("Model", LogLevel.WARNING))
        reason = Waits(budget.variant("a", lambda: ("", ""), 2), "", "")
        result = budget.in_pytorch(lambda wrap=wrap: wrap(Slow.apply(x).sum()), (), {}, reason)
        y = (
            result
            if isinstance(result, torch.Tensor)
            else list(result.values() if isinstance(result, dict) else result)[1 - isinstance(result, dict)]
        )
        y.backward(retain_graph=True)
        y.backward()
        assert budget.waiting[0].eager == 6.0 and budget.steps == 6.0


def test_the_engines_backward_is_counted(clock, monkeypatch):
    module = ORTModule(nn.Linear(4, 4))
    loss = module(torch.randn(3, 4)).sum()
    (graph,) = next(iter(module._ortmodule.graphs.values()))
    assert graph.variant.runs == 1 and graph.variant.seconds == 0.0
    backward = graph.session.plans[next(iter(graph.session.plans))].backward
    assert callable(backward)
    loss.register_hook(lambda grad: clock.go(1.0))  # before the node: not the module's time
    graph.variant.seconds, run = 0.0, capture_budget.clock
    monkeypatch.setattr(capture_budget, "clock", lambda: (clock.go(0.25), run())[1])
    loss.backward()
    assert graph.variant.seconds == 0.25


@pytest.mark.filterwarnings("ignore")
def test_a_module_keeps_so_many_graphs(module, monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    monkeypatch.setattr(capture_budget, "MOST_GRAPHS", 3)
    module, clock = ORTModule(module._ortmodule.module), capture_budget.clock
    for steps in (1, 2, 3, 1, 4):
        clock.go(1.0)
        assert run(module, rows(steps))
    (graphs,) = module._ortmodule.graphs.values()
    assert len(graphs) == 3 and explain(module).exports == 4
    assert run(module, rows(1)) and explain(module).exports == 4
    assert run(module, rows(2)) and explain(module).exports == 5  # it was the one that was used last


def test_a_setting(clock):
    assert ORTModule(nn.Linear(1, 1), config=Config(capture_share=0.5))._ortmodule.budget.share == 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config(fallback_policy="FALLBACK_DISABLE")
        assert ORTModule(nn.Linear(1, 1), config=config)._ortmodule.budget.share == float("inf")
    with pytest.raises(ValueError, match="CAPTURE_SHARE=-1"):
        ORTModule(nn.Linear(1, 1), config=Config(capture_share=-1))


class Dropping(nn.Module):
    """Goes as many ways as there are numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        for _ in range(int(x[:, 0].max())):
            y = y * 2.0
        return nn.functional.dropout(y, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_forward_again_where_it_ran(clock, reentrant):
    """A graph is captured between a forward in PyTorch and its backward, which draws the same masks for all that."""
    torch.manual_seed(0)
    module = ORTModule(Dropping())

    def forward(steps, captured):
        x = rows(steps, 8).repeat(1, 16).requires_grad_()
        y = checkpoint(module, x, use_reentrant=reentrant)
        assert explain(module).captured == captured
        return y

    def check(y, steps):
        module.linear.bias.grad = None
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(module.linear.bias.grad, (y != 0).sum(0) * 2.0 * 2.0**steps)

    check(forward(1, True), 1)
    module._ortmodule.budget.seconds += 1.0  # as if a capture had taken a second
    waited = [forward(2, False) for _ in range(3)]
    check(waited.pop(), 2)
    module._ortmodule.budget.share = float("inf")
    found = [forward(2, True), *waited, forward(2, True)]
    assert module._ortmodule.reruns.calls
    for y in found:
        check(y, 2)
    check(forward(2, True), 2)
    assert explain(module).captured


class OfParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x)


def wraps(module):
    module.layer = nn.Sequential(module.layer, nn.Tanh())


def prunes(module):
    prune.l1_unstructured(module.layer, "weight", 0.25)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("times", "change"), [(1, wraps), (3, wraps), (6, wraps), (1, prunes)])
def test_other_submodules_have_a_first_graph_at_once(clock, times, change):
    """A few times. (A module that gets others again and again is PyTorch's until its steps have paid.)"""
    inner, ran = OfParts(), []
    module = ORTModule(inner)
    for i in range(9):
        x = torch.randn(3, 4)
        torch.testing.assert_close(module(x), inner.layer(x))
        ran.append(explain(module).captured)
        module._ortmodule.budget.seconds += 100.0  # as if captures had taken so long
        if i < times:
            change(inner)
    assert ran == [i <= min(times, MOST_CHANGES) or times <= MOST_CHANGES for i in range(9)]
