"""What forward leaves behind: attributes, caches, buffers, inputs. Every call compares them with PyTorch."""

import copy
import queue
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ortmodule import ORTModule, explain
from tests.twins import made, rows, same


def left(module):
    """All that a module holds but the machinery."""
    standard = vars(nn.Module())
    return [{k: v for k, v in vars(m).items() if k not in standard} for m in module.modules()] + [
        dict(module.named_buffers())
    ]


def steps(eager, captured, exports=None, n=4, loss=lambda m, y: y.sum(), sizes=(3, 5, 2, 3)):
    """A few steps in the engine and in PyTorch: results, gradients and what is left are the same after each."""
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(n):
            found = []
            for module in (ours, eager):
                module.zero_grad()
                x = rows(sizes[step % len(sizes)], 4, seed=step)
                y = module(x)
                found.append([y, left(module)])
                loss(module, y).backward()
                found[-1].append([p.grad for p in module.parameters()])
            same(*found, rtol=1e-5, atol=1e-4)
    report = explain(ours)
    assert report.captured == captured, report.fallback
    if exports is not None:
        assert report.exports == exports
    return report


# --- attributes -------------------------------------------------------------------------------------------------------


def test_an_auxiliary_loss():
    def forward(self, x):
        y = self.linear(x)
        self.aux_loss = y.pow(2).mean()
        return y.tanh()

    steps(made(forward), True, 1, loss=lambda m, y: y.sum() + m.aux_loss)
    steps(made(forward), True, 1, loss=lambda m, y: m.aux_loss)
    steps(made(forward, aux_loss=None), True, 1, loss=lambda m, y: y.sum() + 3 * m.aux_loss)


def test_an_auxiliary_loss_of_a_submodule():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.aux_loss = nn.Linear(4, 4), 0.0

        def forward(self, x):
            y = self.linear(x)
            self.aux_loss = y.softmax(-1).mean(0).pow(2).sum()
            return x + y

    torch.manual_seed(0)
    steps(nn.Sequential(Expert(), Expert()), True, 1, loss=lambda m, y: y.sum() + m[0].aux_loss + 2 * m[1].aux_loss)


def test_an_auxiliary_loss_that_is_taken_away():
    def forward(self, x):
        self.aux_loss = self.linear(x).mean()
        return self.linear(x)

    def loss(module, y):
        value, module.aux_loss = module.aux_loss, None
        return y.sum() + value

    steps(made(forward), True, 1, loss=loss, n=6)


def test_an_attribute_that_is_read_and_set():
    """State that carries a gradient from step to step."""

    def forward(self, x):
        state = x.sum(0) if self.state is None else self.state
        self.state = torch.tanh(self.linear(state))
        return x * self.state

    steps(made(forward, state=None), True, n=4, loss=lambda m, y: (y.sum(), setattr(m, "state", m.state.detach()))[0])


def test_attributes_of_every_kind():
    def forward(self, x):
        y = self.linear(x)
        self.shape, self.rows = y.shape, x.shape[0]
        self.parts = {"y": y, "more": [y.mean(), (y.detach().abs(), None)]}
        self.text, self.flag = "done", True
        return y * 2

    steps(made(forward), True, 1, loss=lambda m, y: y.sum() + m.parts["more"][0])


def test_something_that_is_made_once():
    def forward(self, x):
        if not self.ready:
            self.table = torch.arange(4.0)
            self.ready = True
        return self.linear(x) + self.table

    steps(made(forward, ready=False, table=None), True, 2)


def test_a_table_that_grows():
    def forward(self, x):
        n = x.shape[0]
        if self.table is None or self.table.shape[0] < n:
            self.table = torch.arange(n, dtype=torch.float32)
        return self.linear(x) + self.table[:n, None]

    steps(made(forward, table=None), True, n=8, sizes=(3, 5, 2, 9, 3, 12, 12, 4))


def test_a_counter():
    def forward(self, x):
        self.step += 1
        return self.linear(x) * self.step

    steps(made(forward, step=0), True, 1, n=16)
    steps(made(forward, buffers={"step": torch.zeros(())}), True, 1, n=6)
    steps(made(forward, step=torch.zeros(())), True, 1, n=6)
    steps(made(forward, buffers={"step": torch.zeros((), dtype=torch.int64)}), True, 1, n=6)


def test_a_counter_that_nothing_depends_on():
    def forward(self, x):
        self.calls += 1
        return self.linear(x)

    steps(made(forward, calls=0), True, 1, n=16)


def test_mutable_caches():
    def appends(self, x):
        self.seen.append(x.shape[0])
        return self.linear(x) * len(self.seen)

    def keeps(self, x):
        y = self.linear(x)
        self.seen["last"] = y.detach()
        return y

    def keeps_once(self, x):
        if "w" not in self.seen:
            self.seen["w"] = self.linear.weight.detach().clone()
        return self.linear(x) + x @ self.seen["w"]

    for function, empty in ((appends, []), (keeps, {}), (keeps_once, {})):
        steps(made(function, seen=empty), True, n=6)  # a list that grows has a graph for some lengths alone


def test_capturing_leaves_caches_alone():
    calls = queue.SimpleQueue()  # a list would be seen, too
    note = calls.put

    def forward(self, x):
        note(1)
        self.seen.append(len(self.seen))
        self.inner["a"].add(len(self.seen))
        return self.linear(x)

    ours = ORTModule(made(forward, seen=[], inner={"a": set()}))
    # (The function that makes the module knows the list, too.)
    with pytest.warns(UserWarning, match="changes (what is in the attribute (seen|inner)|a closure's variable)"):
        ours(rows(3, 4))
    assert calls.qsize() > 1 and ours.seen == [0] and ours.inner == {"a": {1}}


def test_a_setting_that_is_found_out():
    """As transformers does with the kind of a problem: the first call sets it."""

    class Config:
        kind = None

        def __init__(self):
            self.kind, self.more = None, {"on": False}

    def forward(self, x):
        if self.config.kind is None:
            self.config.kind = "rows"
        if not self.config.more["on"]:
            self.config.more["on"] = True
            self.config.more["new"] = 3
        return self.linear(x) * (2 if self.config.kind == "rows" else 3)

    def changes(self, x):
        y = self.linear(x) * (2 if self.config.kind is None else 3)
        self.config.kind = "rows"
        return y

    steps(made(forward, config=Config()), True, 1)
    steps(made(changes, config=Config()), True)


def test_a_cache_object():
    def forward(self, x):
        keys, _ = self.cache.update(self.linear(x)[None, None], x[None, None], 0)
        return keys.sum((0, 1, 2))

    ours, eager = ORTModule(made(forward, cache=DynamicCache())), made(forward, cache=DynamicCache())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (3, 2, 4):
            torch.testing.assert_close(ours(rows(n, 4, seed=n)), eager(rows(n, 4, seed=n)))
    assert ours.cache.get_seq_length() == eager.cache.get_seq_length() == 9


def test_parts_that_forward_adds():
    def adds_buffer(self, x):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(4))
        self.late += 1
        return self.linear(x) * self.late

    def adds_module(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Identity()
        return self.late(self.linear(x))

    def fills_buffer(self, x):
        if self.empty is None:
            self.empty = torch.ones(4)
        return self.linear(x) * self.empty

    for function in (adds_buffer, adds_module, fills_buffer):
        steps(made(function, buffers={"empty": None}), True)


def test_lazy_modules():
    torch.manual_seed(0)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    ours = ORTModule(lazy)
    x = rows(3, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = ours(x)
    torch.testing.assert_close(ours(x), first)
    assert explain(ours).captured and ours[0].weight.shape == (4, 5)


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_buffers_in_every_way():
    def forward(self, x):
        y = self.linear(x)
        self.a.add_(1)
        self.b = self.b * 0.5 + y.detach().mean(0)
        self.c = torch.cat([self.c[1:], y.detach().sum()[None]])
        self.d += self.a + self.b
        return y * self.a + self.c.sum()

    buffers = {"a": torch.zeros(()), "b": torch.zeros(4), "c": torch.zeros(3), "d": torch.zeros(4)}
    steps(made(forward, buffers=buffers), True, 1, n=6)


def test_statistics_and_counters():
    torch.manual_seed(0)
    steps(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)), True, 1, n=5)
    steps(nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4)), True, n=5)


@dataclass
class Kept:
    hidden: torch.Tensor


HOLDERS = {
    "a dictionary": lambda h: {"hidden": h},
    "a dictionary in one": lambda h: {"all": {"hidden": h, "n": 1}},
    "a list": lambda h: [h, h * 2],
    "a tuple": lambda h: (h, None),
    "a dataclass": Kept,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_results_that_are_kept_in_a_container(kind):
    """Of one batch they cannot be compared with those of another, in training and afterwards."""

    def forward(self, x):
        h = self.linear(x).relu()
        self.kept = HOLDERS[kind](h.detach())
        return h

    eager = made(forward)
    ours = ORTModule(copy.deepcopy(eager))
    for n in (3, 3, 5):
        for training in (True, False):
            for module in (ours, eager):
                module.train(training)
            x = rows(n, 4)
            torch.testing.assert_close(ours(x), eager(x))
            kept = [vars(m.kept) if kind == "a dataclass" else m.kept for m in (ours, eager)]
            torch.testing.assert_close(*(k["all"] if kind == "a dictionary in one" else k for k in kept))
    report = explain(ours)
    assert report.captured, report.fallback


IN_PLACE = {
    "lerp_": lambda buffer, x: buffer.lerp_(x, 0.1),
    "addcmul_": lambda buffer, x: buffer.addcmul_(x, x, value=0.5),
    "xlogy_": lambda buffer, x: buffer.xlogy_(x.abs()),
    "copy_": lambda buffer, x: buffer.copy_(x.double()),
    "a slice": lambda buffer, x: buffer[1:].lerp_(x[1:], 0.1),
    "a list": lambda buffer, x: torch._foreach_lerp_([buffer], [x], 0.1),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_a_running_average(change):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            change(self.average, y.mean(0))
        return y - self.average

    steps(made(forward, buffers={"average": torch.ones(4)}), True, 1)


def test_a_part_of_a_buffer():
    def forward(self, x):
        y = self.linear(x)
        self.c[1] = y.detach().sum()
        return y * self.c.sum()

    steps(made(forward, buffers={"c": torch.zeros(3)}), True, 1)


def test_inputs_in_place():
    def forward(self, x, state):
        state["h"].mul_(0.5)
        state["h"] += x.sum(0)
        return self.linear(x) * state["h"]

    eager = made(forward)
    ours = ORTModule(copy.deepcopy(eager))
    states = [{"h": torch.ones(4)} for _ in range(2)]
    for step in range(5):
        results = []
        for module, state in zip((ours, eager), states, strict=True):
            module.zero_grad()
            module(rows(2 + step, 4, seed=step), state).sum().backward()
            results.append([state["h"].clone(), module.linear.weight.grad])
        torch.testing.assert_close(*results)
    assert explain(ours).captured and explain(ours).exports == 1


def test_inputs_in_place_that_are_one_tensor():
    """A write shows in every other input over the same memory."""

    def forward(self, x, y):
        x += 1
        return self.linear(x) + y

    eager = made(forward)
    ours = ORTModule(copy.deepcopy(eager))

    def pairs():
        whole = rows(3, 4)
        yield whole, whole
        yield whole[:2], whole[1:]
        yield whole, whole.view(3, 4)
        yield whole[:1], whole[1:2]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for a, b in zip(pairs(), pairs(), strict=True):
            torch.testing.assert_close(ours(*a), eager(*b))
            torch.testing.assert_close(a, b)


def test_a_buffer_that_is_a_view():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("part", self.whole[:2])

        def forward(self, x):
            self.whole += 1
            return x * self.part.sum()

    results = []
    for wrap in (ORTModule, lambda m: m):
        module = wrap(Views())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append([module(rows(2, 4)) for _ in range(3)] + [module.whole, module.part])
    torch.testing.assert_close(*results)
