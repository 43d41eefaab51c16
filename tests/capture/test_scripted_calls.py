"""Scripted functions and submodules that read sizes, take lists apart, loop and branch on constants: in the engine.

Every kind of function by every way in, at several sizes of the batch and of the length.
"""

import copy
import warnings
from typing import List, NamedTuple, Optional, Tuple  # noqa: UP035  # TorchScript's names

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import step

warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
warnings.filterwarnings("ignore", message=".*TorchScript.*")
WIDTH = 8
SIZES = ((2, 5), (3, 4), (2, 5), (4, 7))


def half_turned(x):
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), -1)


def turned(x):
    return x + half_turned(x)


def taken_apart(x):
    b, t, c = x.size()
    return x.view(b, t, 2, c // 2).transpose(2, 3).reshape(b, t, -1)


def heads(x):
    b, t, c = x.shape
    y = x.view(b, t, 2, -1).transpose(1, 2)
    return (torch.softmax(y @ y.transpose(-2, -1) / (c // 2) ** 0.5, -1) @ y).transpose(1, 2).contiguous().view(b, t, c)


def positions(x):
    return x + torch.arange(x.size(1), device=x.device).to(x.dtype)[None, :, None] / x.size(1)


def filled(x):
    return x + torch.zeros(x.size(0), x.size(1), 1, dtype=x.dtype, device=x.device) + torch.ones_like(x)


def causal(x):
    n = x.size(1)
    mask = torch.full([n, n], -1e9, dtype=x.dtype).triu(1)
    return torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x


def looped(x):
    for i in range(3):
        x = x * 0.5 + i
    return x


def over_constants(x):
    for scale in [0.5, 2.0]:
        x = torch.tanh(x * scale)
    return x


def by_rank(x):
    if x.dim() == 3:
        return x.exp() * 0.1
    return x * 2


def by_flag(x, flag: bool = True, scale: float = 0.5):
    if flag:
        return x * scale
    return x + scale


def optional(x, other: Optional[torch.Tensor] = None):  # noqa: UP045
    if other is None:
        return x.sigmoid() * x
    return x * other


def two(x) -> Tuple[torch.Tensor, torch.Tensor]:  # noqa: UP006
    a, b = x.chunk(2, -1)
    return torch.cat((b, a), -1), x * x.size(-1)


def pair_sum(x):
    a, b = two(x)
    return a + b


def listed(x) -> List[torch.Tensor]:  # noqa: UP006
    return [x * 2, x.tanh()]


def list_sum(x):
    parts = listed(x)
    return parts[0] - parts[1] + torch.stack(parts).mean(0)


def parts_of(x):
    parts = torch.split(x, x.size(-1) // 2, -1)
    return torch.cat([parts[1], parts[0]], -1)


def in_place(x):
    y = x.clone()
    y[:, 0] = y[:, 0] * 2
    y += 1
    return y


FUNCTIONS = {
    function.__name__: function
    for function in (
        turned, taken_apart, heads, positions, filled, causal, looped, over_constants, by_rank, by_flag, optional,
        pair_sum, list_sum, parts_of, in_place,
    )
}  # fmt: skip
#: Their control flow is left where it was scripted as a module.
SCRIPTED = {name: torch.jit.script(function) for name, function in FUNCTIONS.items()}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


class Method(Calls):
    def mix(self, h):
        return self.function(h) + h

    def forward(self, x):
        return self.last(self.mix(self.first(x)))


class Twice(Calls):
    """In a submodule, and beside it."""

    def __init__(self, function):
        super().__init__(function)
        self.inner = Calls(function)

    def forward(self, x):
        return self.last(self.function(self.inner(self.first(x))))


class Global(Calls):
    def __init__(self, name):
        super().__init__(None)
        self.name = name

    def forward(self, x):
        return self.last(SCRIPTED[self.name](self.first(x)))


def nested(name):
    """A scripted function in a closure."""
    scripted = SCRIPTED[name]

    def call(x):
        return scripted(x)

    return Calls(call)


WAYS = {
    "attribute": lambda name: Calls(SCRIPTED[name]),
    "global": Global,
    "method": lambda name: Method(SCRIPTED[name]),
    "submodule": lambda name: Twice(SCRIPTED[name]),
    "closure": nested,
}


CASES = [(name, way) for name in FUNCTIONS for way in WAYS]
SHORT = (("turned", "global"), ("taken_apart", "submodule"), ("looped", "attribute"), ("pair_sum", "method"),
         ("causal", "closure"))  # fmt: skip


def compare(make, monkeypatch):
    """Results and gradients at all sizes; the report."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    modules = []
    for _ in range(2):  # what is scripted has no copies
        torch.manual_seed(0)
        modules.append(make())
    ours, eager = ORTModule(modules[0]), modules[1]
    for rows, n in SIZES:
        x = torch.randn(rows, n, WIDTH)
        torch.testing.assert_close(step(ours, x.clone()), step(eager, x.clone()), rtol=1e-4, atol=1e-5)
    return explain(ours)


@each("name,way", CASES, SHORT)
def test_functions(name, way, monkeypatch):
    """One graph for all sizes, nothing of it PyTorch's."""
    report = compare(lambda: WAYS[way](name), monkeypatch)
    assert report.captured and report.exports == 1 and not report.pytorch_calls, report
    assert not report.python_ops and not report.aten_ops, report


def by_length(x):
    if x.size(1) > 4:
        return x * 2
    return x + 1


def by_values(x):
    if bool(x.mean() > 0):
        return x * 2
    return x + 1


def until(x):
    while bool(x.abs().mean() > 0.3):
        x = x * 0.5
    return x


def over_length(x):
    y = torch.zeros_like(x[:, 0])
    for i in range(x.size(1)):
        y = y * 0.5 + x[:, i]
    return x + y[:, None]


DECIDING = {function.__name__: torch.jit.script(function) for function in (by_length, by_values, until, over_length)}


def by_hand(name):
    """The same in Python."""
    return globals()[name]


@each("name", DECIDING, ("by_length", "by_values"))
def test_what_sizes_and_values_decide(name, monkeypatch):
    """It is chosen anew for every call, by as many graphs as Python's control flow takes."""
    report = compare(lambda: Calls(DECIDING[name]), monkeypatch)
    assert report.captured and not report.python_ops, report
    in_python = compare(lambda: Calls(by_hand(name)), monkeypatch)
    assert (report.exports, report.pytorch_calls) == (in_python.exports, in_python.pytorch_calls), (report, in_python)


# --- where TorchScript is not Python ----------------------------------------------------------------------------------


def helper(x):
    return x * 3


def with_helper(x):
    return helper(x) + 1


def asks(x):
    if torch.jit.is_scripting():
        return x * 2
    return x * 5


def asking_helper(x):
    return asks(x) + 1


def powers(x):
    n = x.size(1) ** 2
    return x * (torch.ones(3, dtype=torch.int64) * n).mean() if n == 4 else x + (torch.ones(3).long() * n).sum() / 9


def rounded(x):
    return x * (torch.ones(2, dtype=torch.int64) * round(x.size(1) * 0.3)).sum()


def divided(x):
    n = -x.size(1)
    return x * (n // 2) + (n % 3) + n / 2


def typed(x, scale: float = 2.0):
    return x + (torch.ones(3, dtype=torch.int64) * scale).mean() / (torch.ones(3, dtype=torch.int64) * scale).sum()


def lengthened(x, parts: List[torch.Tensor]):  # noqa: UP006
    parts.append(x)
    return torch.stack(parts).sum(0)


def sizes_as_list(x):
    shape = x.size()
    shape[1] = 1
    return x + torch.ones(shape)


class Two(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def named(x) -> Two:
    return Two(x, x * 2)


def written(x):
    x.mul_(2)
    return x + 1


SPECIAL = {
    function.__name__: torch.jit.script(function)
    for function in (
        with_helper, asks, asking_helper, powers, rounded, divided, typed, lengthened, sizes_as_list, named, written,
    )
}  # fmt: skip


class CallsWith(Calls):
    def forward(self, x):
        h = self.first(x) * 1
        if self.function is SPECIAL["typed"]:
            return self.last(self.function(h, 3) + self.function(h, scale=2) + self.function(h))
        if self.function is SPECIAL["lengthened"]:
            parts = [h]
            return self.last(self.function(h, parts)) * len(parts)
        if self.function is SPECIAL["named"]:
            two = self.function(h)
            return self.last(two.one + two.other)
        return self.last(self.function(h) + h)


@pytest.mark.parametrize("name", SPECIAL)
def test_where_they_differ(name, monkeypatch):
    compare(lambda: CallsWith(SPECIAL[name]), monkeypatch)


def test_a_helper_that_is_another_one_by_now(monkeypatch):
    """A scripted function goes on with the one that there was."""
    function = torch.jit.script(with_helper)
    monkeypatch.setitem(globals(), "helper", lambda x: x * 7)
    compare(lambda: Calls(function), monkeypatch)


def test_functions_without_python(monkeypatch):
    """One that was traced goes one way for ever, one that was loaded has no Python."""
    traced = torch.jit.trace(by_length, (torch.randn(2, 3, WIDTH),), check_trace=False)
    compare(lambda: Calls(traced), monkeypatch)
    loaded = torch.jit.CompilationUnit("def f(x):\n    return x * 2 if x.size(1) > 4 else x\n").f
    compare(lambda: Calls(loaded), monkeypatch)


def test_another_function_takes_its_place(monkeypatch):
    """The next call runs that one."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    torch.manual_seed(0)
    eager = Global("turned")
    ours, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 4, WIDTH)
    for name in ("turned", "looped", "turned", "by_rank"):
        monkeypatch.setitem(SCRIPTED, "turned", torch.jit.script(FUNCTIONS[name]))
        for _ in range(2):
            torch.testing.assert_close(step(ours, x.clone()), step(eager, x.clone()), rtol=1e-4, atol=1e-5)
    held = Calls(SCRIPTED["turned"])
    ours = ORTModule(held)
    for name in ("turned", "looped"):
        held.function = torch.jit.script(FUNCTIONS[name])
        found = step(ours, x.clone())
        torch.testing.assert_close(found[0], held(x), rtol=1e-4, atol=1e-5)
    assert explain(ours).captured


PLACE = SCRIPTED["turned"]


class NamesGlobal(Calls):
    def forward(self, x):
        return self.last(PLACE(self.first(x)))


def test_another_function_under_a_global_name(monkeypatch):
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    torch.manual_seed(0)
    eager = NamesGlobal(None)
    ours, x = ORTModule(copy.deepcopy(eager)), torch.randn(2, 4, WIDTH)
    for name in ("turned", "looped", "turned"):
        monkeypatch.setitem(globals(), "PLACE", SCRIPTED[name])
        for _ in range(2):
            torch.testing.assert_close(step(ours, x.clone()), step(eager, x.clone()), rtol=1e-4, atol=1e-5)
    assert explain(ours).captured


def test_scripted_submodules(monkeypatch):
    """Around one the engine runs the rest."""
    report = compare(lambda: Calls(torch.jit.script(Calls(torch.tanh))), monkeypatch)
    assert report.captured and report.python_ops, report
