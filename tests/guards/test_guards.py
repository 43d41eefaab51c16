"""What a captured graph rests on is looked at in every call: each case fails with the result of before."""

import copy
import enum
import functools
import sys
import types
from collections import deque

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ortmodule import ORTModule, _core, explain
from tests.twins import made, rows


class Colour(enum.Enum):
    RED, BLUE = 1, 2


class Config:
    def __init__(self, **values):
        vars(self).update(values)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Pair:
    """A module in the engine and in PyTorch; `change` is done to both."""

    def __init__(self, module):
        self.eager = module
        self.ours = ORTModule(copy.deepcopy(module))

    def change(self, function):
        for model in (self.eager, self.ours):
            function(model)

    def check(self, *args, captured=True, **kwargs):
        """The same result and gradients of parameters; returns the number of exports."""
        results = []
        for model in (self.ours, self.eager):
            model.zero_grad()
            result = model(*args, **kwargs)
            tensors = [result] if isinstance(result, torch.Tensor) else list(result)
            loss = sum(t.sum() for t in tensors if t.requires_grad)
            if isinstance(loss, torch.Tensor):
                loss.backward()
            results.append([tensors, [t.requires_grad for t in tensors], [p.grad for p in model.parameters()]])
        torch.testing.assert_close(*results)
        report = explain(self.ours)
        assert report.captured == captured, report.fallback
        return report.exports


# --- attributes -------------------------------------------------------------------------------------------------------


def assign(name, value):
    return lambda model: setattr(model, name, value)


ATTRIBUTES = {
    "bool": (lambda self, x: self.linear(x) if self.a else x * 2, True, assign("a", False)),
    "int": (lambda self, x: self.linear(x) * self.a, 2, assign("a", 3)),
    "float": (lambda self, x: self.linear(x) * self.a, 2.0, assign("a", 2.5)),
    "int to float": (lambda self, x: (x * self.a).to(torch.float64) + self.linear(x) * (self.a / 2), 3, assign("a", 1)),
    "text": (lambda self, x: getattr(torch, self.a)(self.linear(x)), "tanh", assign("a", "exp")),
    "None": (lambda self, x: self.linear(x) if self.a is None else self.linear(x) * self.a, None, assign("a", 3.0)),
    "enum": (lambda self, x: self.linear(x) * (2 if self.a is Colour.RED else 3), Colour.RED, assign("a", Colour.BLUE)),
    "type": (lambda self, x: self.linear(x).to(self.a), torch.float64, assign("a", torch.float16)),
    "function": (lambda self, x: self.a(self.linear(x)), torch.tanh, assign("a", torch.exp)),
    "partial": (
        lambda self, x: self.a(self.linear(x)),
        functools.partial(torch.mul, other=2),
        assign("a", functools.partial(torch.mul, other=3)),
    ),
    "list": (lambda self, x: sum(self.linear(x) * n for n in self.a), [1.0, 2.0], lambda m: m.a.append(4.0)),
    "inside a list": (lambda self, x: self.linear(x) * self.a[0][0], [[1.0]], lambda m: m.a[0].__setitem__(0, 3.0)),
    "dict": (lambda self, x: self.linear(x) * self.a["s"], {"s": 2.0}, lambda m: m.a.update(s=3.0)),
    "a key": (lambda self, x: self.linear(x) if "on" in self.a else x + self.linear(x), {}, lambda m: m.a.update(on=1)),
    "set": (lambda self, x: self.linear(x) * len(self.a), {1, 2}, lambda m: m.a.add(3)),
    "deque": (lambda self, x: self.linear(x) * self.a[-1], deque([2.0]), lambda m: m.a.append(3.0)),
    "array": (
        lambda self, x: self.linear(x) * torch.from_numpy(self.a),
        numpy.arange(4, dtype=numpy.float32),
        lambda m: m.a.__setitem__(0, 5.0),
    ),
    "object": (lambda self, x: self.linear(x) * self.a.scale, Config(scale=2.0), lambda m: setattr(m.a, "scale", 3.0)),
    "deep inside": (
        lambda self, x: self.linear(x) * self.a.inner["list"][1].scale,
        Config(inner={"list": [1, Config(scale=2.0)]}),
        lambda m: setattr(m.a.inner["list"][1], "scale", 3.0),
    ),
    "slots": (lambda self, x: self.linear(x) * self.a.scale, Slotted(2.0), lambda m: setattr(m.a, "scale", 3.0)),
    "namespace": (
        lambda self, x: self.linear(x) * self.a.scale,
        types.SimpleNamespace(scale=2.0),
        lambda m: setattr(m.a, "scale", 3.0),
    ),
    "by vars": (lambda self, x: self.linear(x) * vars(self)["a"], 2.0, assign("a", 3.0)),
    "tensor": (lambda self, x: self.linear(x) * self.a, torch.ones(4), assign("a", torch.full((4,), 3.0))),
    "tensor in place": (lambda self, x: self.linear(x) * self.a, torch.ones(4), lambda m: m.a.mul_(3)),
    "tensor's type": (lambda self, x: self.linear(x) * self.a, torch.ones(4), assign("a", torch.ones(4).double())),
    "tensor's shape": (lambda self, x: self.linear(x) * self.a, torch.ones(4), assign("a", torch.ones(1))),
    "tensor to number": (lambda self, x: self.linear(x) * self.a, torch.ones(4), assign("a", 3.0)),
    "tensor in a list": (
        lambda self, x: self.linear(x) * self.a[0],
        [torch.ones(4)],
        lambda m: m.a.__setitem__(0, torch.full((4,), 3.0)),
    ),
    "tensor in a list, in place": (
        lambda self, x: self.linear(x) * self.a[0],
        [torch.ones(4)],
        lambda m: m.a[0].mul_(3),
    ),
    "tensor in an object, in place": (
        lambda self, x: self.linear(x) * self.a.t,
        Config(t=torch.ones(4)),
        lambda m: m.a.t.data.mul_(3),
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_changes(name):
    function, value, change = ATTRIBUTES[name]
    pair = Pair(made(function, a=value))
    x = rows(3, 4)
    pair.check(x), pair.check(x)
    pair.change(change)
    pair.check(x), pair.check(x)


def test_an_attribute_set_later():
    pair = Pair(made(lambda self, x: self.linear(x) * getattr(self, "scale", 1.0)))
    assert pair.check(rows(3, 4)) == 1
    pair.change(assign("scale", 3.0))
    assert pair.check(rows(3, 4)) == 2
    pair.change(lambda m: delattr(m, "scale"))
    assert pair.check(rows(3, 4)) == 2


def test_an_attribute_of_the_class():
    pair = Pair(made(lambda self, x: self.linear(self.helper(x)) * self.class_scale))
    cls = type(pair.eager)
    assert pair.check(rows(3, 4)) == 1
    cls.class_scale = 3.0
    assert pair.check(rows(3, 4)) == 2
    cls.helper = lambda self, x: x * 2
    assert pair.check(rows(3, 4)) == 3


GLOBAL, FLAG = 2.0, False


def of_globals(x):
    return x * 3 if FLAG else x


def test_globals(monkeypatch):
    pair = Pair(made(lambda self, x: of_globals(self.linear(x)) * GLOBAL))
    here = sys.modules[__name__]
    assert pair.check(rows(3, 4)) == 1
    monkeypatch.setattr(here, "GLOBAL", 3.0)
    assert pair.check(rows(3, 4)) == 2
    monkeypatch.setattr(here, "FLAG", True)
    assert pair.check(rows(3, 4)) == 3
    monkeypatch.undo()
    assert pair.check(rows(3, 4)) == 3


def test_an_attribute_of_a_submodule():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.LayerNorm(4)))
    assert pair.check(rows(3, 4)) == 1
    pair.change(lambda m: setattr(m[1], "negative_slope", 0.5))
    assert pair.check(rows(3, 4)) == 2
    pair.change(lambda m: setattr(m[2], "eps", 0.5))
    assert pair.check(rows(3, 4)) == 3
    pair.change(lambda m: setattr(m[1], "negative_slope", 0.1))
    pair.change(lambda m: setattr(m[2], "eps", 1e-5))
    assert pair.check(rows(3, 4)) == 3


def test_an_attribute_that_forward_does_not_read_costs_nothing():
    pair = Pair(made(lambda self, x: self.linear(x)))
    for step in range(12):
        pair.change(assign("step", step))
        pair.change(lambda m: setattr(m, "log", [*getattr(m, "log", []), step]))  # noqa: B023
        assert pair.check(rows(3, 4)) == 1


def test_an_attribute_that_never_stays(monkeypatch):
    """One graph for all values is made when it pays; until then PyTorch runs the module, and the results are right."""
    monkeypatch.delenv("ORTMODULE_CAPTURE_SHARE", raising=False)
    pair = Pair(made(lambda self, x: self.linear(x) * self.step))
    for step in range(8):
        pair.change(assign("step", step))
        pair.check(rows(3, 4), captured=step == 0)
    assert "the attribute step is another one at each call" in explain(pair.ours).fallback
    assert explain(pair.ours).exports == 1


@pytest.mark.parametrize("first", [2, 0.5])
def test_a_number_that_changes_again_and_again(first):
    """The third value makes one graph for all; the graphs for the first values still are for these."""
    pair = Pair(made(lambda self, x: self.linear(x) * self.step + self.step, step=first))
    for exports, step in ((1, first), (2, first * 3), (3, first * 5), (3, first * 7), (3, first), (3, first * 3)):
        pair.change(assign("step", step))
        assert pair.check(rows(3, 4)) == exports
    pair.change(assign("step", True))
    assert pair.check(rows(3, 4)) == 4


def collects(self, x):
    self.kept, y = [], x
    for _ in range(2):
        y = self.linear(y).tanh()
        self.kept.append(y)
    return sum(self.kept)


def sets_late(self, x):
    first = self.kept
    self.kept = [self.linear(x).detach()]
    return self.linear(x) * len(first)


def test_an_attribute_that_forward_sets_before_it_reads_it():
    """What it was before is no matter; where it is read first it is one."""
    pair = Pair(made(collects, kept=None))
    for value in (None, None, 3, "text", [torch.ones(1)]):
        assert pair.check(rows(3, 4)) == 1
        pair.change(assign("kept", value))
    pair = Pair(made(sets_late, kept=[1, 2]))
    for count in (2, 1, 3):
        pair.change(assign("kept", [0] * count))
        pair.check(rows(3, 4))


def test_flipping_an_attribute_makes_two_exports():
    pair = Pair(made(lambda self, x: self.linear(x) if self.flag else x * 2, flag=True))
    for step in range(8):
        pair.change(assign("flag", step % 2 == 0))
        assert pair.check(rows(3, 4)) == min(step + 1, 2)


def test_equal_values_are_equal():
    pair = Pair(made(lambda self, x: self.linear(x) * self.a.scale, a=Config(scale=2.0, names=["x"])))
    for _ in range(3):
        assert pair.check(rows(3, 4)) == 1
        pair.change(assign("a", Config(scale=2.0, names=["x"])))


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, values",
    [
        (lambda self, x, a: self.linear(x) if a else x * 2, (True, False)),
        (lambda self, x, a: getattr(torch, a)(self.linear(x)), ("tanh", "exp")),
        (lambda self, x, a: self.linear(x) * (1 if a is None else a), (None, 3)),
        (lambda self, x, a: self.linear(x) * (2 if a is Colour.RED else 3), (Colour.RED, Colour.BLUE)),
        (lambda self, x, a: self.linear(x) * a, (2, 2.5)),
        (lambda self, x, a: self.linear(x) * (2 if isinstance(a, bool) else 3), (True, 1)),
        (lambda self, x, a: self.linear(x) + sum(a), ([rows(4)], [rows(4), rows(4, seed=1)])),
        (lambda self, x, a: self.linear(x) + (3 if isinstance(a, tuple) else 4), ([1], (1,))),
        (lambda self, x, a: self.linear(x) * (2 if "k" in a else 3), ({"k": 1}, {"j": 1})),
    ],
    ids=["bool", "text", "None", "enum", "numbers", "bool and int", "lists", "list and tuple", "keys"],
)
def test_an_argument_that_flips(function, values):
    pair = Pair(made(function))
    for i, value in enumerate((*values, *values)):
        assert pair.check(rows(3, 4), value) == min(i + 1, 2)


def test_an_input_that_starts_to_require_a_gradient():
    pair = Pair(made(lambda self, x: self.linear(x) * (2 if x.requires_grad else 3)))
    found = []
    for needs in (False, True, False, True):
        grads = []
        for model in (pair.ours, pair.eager):
            x = rows(3, 4).requires_grad_(needs)
            model(x).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)
        found.append(pair.check(rows(3, 4).requires_grad_(needs)))
    assert found == [1, 2, 2, 2]


def test_types_ranks_and_layouts():
    pair = Pair(made(lambda self, x: self.linear(x.float()).sum(-1)))
    x = rows(3, 4)
    for each in (x, x.double(), x[None], x.int(), x.to_sparse().to_dense(), x.t().contiguous().t(), x[0]):
        pair.check(each)
    ours = ORTModule(made(lambda self, x: self.linear(x.to_dense())))
    found = ours(x.to_sparse())
    assert explain(ours).captured
    torch.testing.assert_close(found, made(lambda self, x: self.linear(x))(x))


def test_two_structures_make_two_exports():
    pair = Pair(made(lambda self, x, y=None: self.linear(x) if y is None else self.linear(x + y)))
    for i in range(6):
        assert pair.check(*[rows(3, 4)] * (1 + i % 2)) == min(i + 1, 2)


# --- modes ------------------------------------------------------------------------------------------------------------


def test_train_and_eval():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for i in range(6):
        pair.change(lambda m, i=i: m.train(i % 2 == 0))
        assert pair.check(rows(5, 4)) == min(i + 1, 2)
        torch.testing.assert_close(dict(pair.ours.named_buffers()), dict(pair.eager.named_buffers()))


def test_a_submodule_in_eval_mode():
    pair = Pair(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for i in range(4):
        pair.change(lambda m, i=i: m[2].train(i % 2 == 0))
        assert pair.check(rows(5, 4)) == min(i + 1, 2)
        torch.testing.assert_close(dict(pair.ours.named_buffers()), dict(pair.eager.named_buffers()))


def test_autocast_states():
    pair = Pair(made(lambda self, x: self.linear(x) * (2 if torch.is_autocast_enabled("cpu") else 3)))
    for _ in range(4):
        for enabled, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float16)):
            with torch.autocast("cpu", dtype, enabled=enabled):
                found, expected = pair.ours(rows(3, 4)), pair.eager(rows(3, 4))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert explain(pair.ours).exports == 3 and explain(pair.ours).captured


def test_grad_modes():
    pair = Pair(made(lambda self, x: self.linear(x) * (2 if torch.is_grad_enabled() else 3)))
    for i in range(2):
        assert pair.check(rows(3, 4)) == 1 + 2 * (i > 0)
        with torch.no_grad():
            pair.check(rows(3, 4))
        with torch.inference_mode():
            found, expected = pair.ours(rows(3, 4)), pair.eager(rows(3, 4))
            torch.testing.assert_close(found.clone(), expected.clone())
    assert explain(pair.ours).exports == 3


def test_determinism():
    pair = Pair(made(lambda self, x: self.linear(x) * (2 if torch.are_deterministic_algorithms_enabled() else 3)))
    try:
        for i in range(4):
            torch.use_deterministic_algorithms(i % 2 == 1)
            assert pair.check(rows(3, 4)) == min(i + 1, 2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_default_type():
    pair = Pair(made(lambda self, x: self.linear(x) + torch.full((4,), 0.1)))
    try:
        for i in range(4):
            torch.set_default_dtype((torch.float32, torch.float64)[i % 2])
            assert pair.check(rows(3, 4).float()) == min(i + 1, 2)
    finally:
        torch.set_default_dtype(torch.float32)


# --- parts of the module ----------------------------------------------------------------------------------------------


def test_parameters_that_are_frozen_and_unfrozen():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    for i in range(6):
        pair.change(lambda m, i=i: m[0].weight.requires_grad_(i % 2 == 0))
        assert pair.check(rows(3, 4)) == min(i + 1, 2)


def test_parametrizations():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = rows(3, 4)
    pair.check(x)

    class Twice(nn.Module):
        def forward(self, w):
            return w * 2

    pair.change(lambda m: parametrize.register_parametrization(m[0], "weight", Twice()))
    pair.check(x)
    pair.change(lambda m: parametrize.remove_parametrizations(m[0], "weight"))
    pair.check(x)
    pair.change(lambda m: parametrizations.weight_norm(m[0]))
    pair.check(x)
    pair.change(lambda m: parametrize.remove_parametrizations(m[0], "weight"))
    pair.check(x)


def test_a_bias_that_appears():
    pair = Pair(nn.Sequential(nn.Linear(4, 4, bias=False)))
    pair.check(rows(3, 4))
    pair.change(lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(4))))
    pair.check(rows(3, 4))
    pair.change(lambda m: setattr(m[0], "bias", None))
    pair.check(rows(3, 4))


def test_weights_that_are_tied_and_untied():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    pair.check(rows(3, 4))
    pair.change(lambda m: setattr(m[1], "weight", m[0].weight))
    pair.check(rows(3, 4))
    pair.change(lambda m: setattr(m[1], "weight", nn.Parameter(torch.eye(4))))
    pair.check(rows(3, 4))


def test_adapters_that_are_toggled():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(4, 4).requires_grad_(False)
            self.lora = nn.ModuleDict({n: nn.Linear(4, 4, bias=False) for n in ("a", "b")})
            self.active, self.disabled = ["a"], False

        def forward(self, x):
            y = self.base(x)
            return y if self.disabled else y + sum(self.lora[name](x) for name in self.active)

    torch.manual_seed(0)
    pair = Pair(Adapted())
    for _ in range(2):
        for change in (
            assign("disabled", True),
            assign("disabled", False),
            assign("active", ["b"]),
            lambda m: m.active.append("a"),
            assign("active", ["a"]),
            lambda m: m.lora["a"].requires_grad_(False),
            lambda m: m.lora["a"].requires_grad_(True),
        ):
            pair.change(change)
            exports = pair.check(rows(3, 4))
    assert exports == 5


def test_parts_that_come_and_go_are_remembered():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    extra = nn.Linear(4, 4)
    for i in range(6):
        pair.change((lambda m: m.append(extra)) if i % 2 else (lambda m: m.pop(-1) if len(m) > 2 else None))
        extra.zero_grad()
        assert pair.check(rows(3, 4)) == min(i + 1, 2)


def test_a_method_that_is_replaced():
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    pair.check(rows(3, 4))
    pair.change(lambda m: setattr(m[1], "forward", lambda x: x * 2))
    pair.check(rows(3, 4))
    pair.change(lambda m: delattr(m[1], "forward"))
    assert pair.check(rows(3, 4)) == 2


# --- the watch --------------------------------------------------------------------------------------------------------

TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


def test_watch():
    p, q = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(2, 3))
    inside, exact = {"a": p, "b": 1, "c": p}, [1, torch.ones(2)]
    watch = _core.Watch([inside], [exact], [], [], TENSORS)
    assert not watch.changed()
    inside["a"] = q
    assert watch.changed()  # no longer tied
    inside["c"] = q
    assert not watch.changed()  # of the same kind, tied as before
    q.requires_grad_(False)
    assert watch.changed()
    q.requires_grad_(True)
    q.data = q.data.double()
    assert watch.changed()
    q.data = torch.ones(3, 2)
    assert watch.changed()
    q.data = torch.ones(2, 3)
    assert not watch.changed()
    exact[1] = torch.ones(2)
    assert watch.changed()


def test_watch_sees_new_ties():
    a, b = torch.ones(2), torch.ones(2)
    for change in ({"x": b}, {"y": a}):
        inside = {"x": a, "y": b}
        watch = _core.Watch([inside], [], [], [], TENSORS)
        inside.update(change)
        assert watch.changed()
    inside = {"x": a, "y": b}
    watch = _core.Watch([inside], [], [], [], TENSORS)
    inside.update(x=b, y=a)
    assert not watch.changed()


def test_watch_sees_keys_lengths_classes_and_names():
    class A:
        value = 1

    class B(A):
        pass

    thing, inside, items = A(), {"a": 1}, [1]
    watch = _core.Watch([inside, items], [], [(A, "value", A.value)], [(thing, A)], TENSORS)
    for do, undo in (
        (lambda: inside.update(b=2), lambda: inside.pop("b")),
        (lambda: items.append(2), items.pop),
        (lambda: setattr(thing, "__class__", B), lambda: setattr(thing, "__class__", A)),
        (lambda: setattr(A, "value", 2), lambda: setattr(A, "value", 1)),
    ):
        assert not watch.changed()
        do()
        assert watch.changed()
        undo()
    assert not watch.changed()


def test_watch_is_unsure_about_other_tensors():
    class Mine(torch.Tensor):
        pass

    for tensor in (torch.ones(2).as_subclass(Mine), torch.ones(2).to_sparse()):
        assert _core.Watch([{"a": tensor}], [], [], [], TENSORS).changed()


@pytest.mark.parametrize(
    "arguments",
    [
        ([3], [], [], [], TENSORS),
        ([], [()], [], [], TENSORS),
        ([], [], [(int, 3, None)], [], TENSORS),
        ([], [], [], [3], TENSORS),
        ([], [], [], [], ()),
        ([], [], [], [], (3,)),
        ([], [], [], []),
    ],
)
def test_watch_refuses(arguments):
    with pytest.raises(TypeError):
        _core.Watch(*arguments)


def test_watch_keeps_what_it_compares():
    """An object that is gone cannot be mistaken for a new one at its address; nothing is leaked."""
    value = object()
    before = sys.getrefcount(value)
    inside = {"a": value}
    watch = _core.Watch([inside], [], [], [], TENSORS)
    assert sys.getrefcount(value) == before + 2
    for _ in range(100):
        inside["a"] = object()
        assert watch.changed()
    del watch
    assert sys.getrefcount(value) == before
