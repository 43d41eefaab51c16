"""One tensor given twice, or one that the module holds: forward sees that it is one tensor, as in PyTorch."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each
from tests.twins import made, rows, same

GLOBAL = torch.ones(4, 4)


def factor(flag):
    return 2.0 if flag else 3.0


#: What forward does with two tensors `x`, `y`, either of which may be the other.
USES = {
    "is": lambda self, x, y: self.linear(x) * factor(x is y),
    "is not": lambda self, x, y: self.linear(x) * factor(x is not y),
    "id": lambda self, x, y: self.linear(x) * factor(id(x) == id(y)),
    "in a set": lambda self, x, y: self.linear(x) * len({id(x), id(y)}),
    "any": lambda self, x, y: self.linear(x) * factor(any(each is y for each in (x, self.linear.weight))),
    "key": lambda self, x, y: self.linear(x) * {id(x): 2.0}.get(id(y), 5.0),
    "write": lambda self, x, y: (x.add_(1), self.linear(y))[1],
    "write, both": lambda self, x, y: (x.add_(1), y.mul_(2), self.linear(x) + y)[2],
    "results": lambda self, x, y: (x, y, self.linear(x)),
    "gradients": lambda self, x, y: self.linear(x) * y,
}

#: The arguments of a call of `forward(self, first, second, **others)`, and how it finds `x` and `y` in them.
WAYS = {
    "arguments": (lambda x, y: ((x, y), {}), lambda a, b=None: (a, b)),
    "keywords": (lambda x, y: ((), {"b": y, "a": x}), lambda a, b=None: (a, b)),
    "a list": (lambda x, y: (([x, y],), {}), lambda a, b=None: (a[0], a[1])),
    "a dictionary": (lambda x, y: ((x,), {"b": {"y": y}}), lambda a, b=None: (a, b["y"])),
    "two containers": (lambda x, y: (([x], (1, {"y": y})), {}), lambda a, b=None: (a[0], b[1]["y"])),
    "behind a number": (lambda x, y: (((x, 2.5, True), y), {}), lambda a, b=None: (a[0], b)),
}


def module(use, find):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a, b=None):
            return use(self, *find(a, b))

    torch.manual_seed(0)
    return Module()


def check(eager, ours, arguments):
    """The same results, contents of inputs and gradients. ``arguments``: a function that makes (args, kwargs, leaves)
    for one of the modules."""
    found = []
    for each_module in (ours, eager):
        args, kwargs, leaves = arguments(each_module)
        each_module.zero_grad()
        result = each_module(*args, **kwargs)
        tensors = result if isinstance(result, tuple) else (result,)
        loss = sum(t.sum() for t in tensors if t.requires_grad)
        loss.backward()
        found.append(
            (result, [p.grad for p in each_module.parameters()], leaves, [t.grad for t in leaves if t.is_leaf])
        )
        ids = [next((i for i, leaf in enumerate(leaves) if leaf is t), None) for t in tensors]
        found[-1] += (ids,)
    same(*found)


def pairs(gradient):
    """Two tensors, and one twice."""

    def make():
        return (rows(4, 4) * 1).requires_grad_(gradient)

    def different(_):
        return make(), make()

    def equal(_):
        return (make(),) * 2

    return different, equal


@each(
    "use,way",
    list(itertools.product(USES, WAYS)),
    lambda pair: pair[1] == "arguments" or pair in [("is", way) for way in WAYS],
)
def test_one_tensor_twice(use, way):
    give, find = WAYS[way]
    eager = module(USES[use], find)
    ours = ORTModule(copy.deepcopy(eager))
    different, equal = pairs(use in ("gradients", "results"))
    for make in (different, equal, different, equal, equal):

        def arguments(_, make=make):
            x, y = make(_)
            return *give(x, y), [x, y]

        check(eager, ours, arguments)
    report = explain(ours)
    assert report.captured, report.fallback
    assert report.exports == 2


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_which_of_three(first):
    """Every way in which three arguments can be the same, whichever comes first."""
    eager = made(lambda self, x, y, z: self.linear(x) * factor(x is y) * factor(y is z) * factor(x is z) ** 2)
    ours = ORTModule(eager)
    kinds = [(0, 1, 2), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0)]
    for kind in kinds[first:] + kinds[:first]:
        tensors = [rows(4, 4) for _ in range(3)]
        given = [tensors[i] for i in kind]
        torch.testing.assert_close(ours(*given), eager(*given))


def test_numbers_that_change_stand_between():
    eager = made(lambda self, x, n, y: self.linear(x) * n * factor(x is y))
    ours = ORTModule(eager)
    for step in range(8):
        x = rows(4, 4)
        y = x if step % 3 else rows(4, 4)
        torch.testing.assert_close(ours(x, 1.5 + step, y), eager(x, 1.5 + step, y))


def test_a_sparse_tensor_twice():
    eager = made(lambda self, x, y: self.linear(x.to_dense() + y.to_dense()) * factor(x is y))
    ours = ORTModule(eager)
    for twice in (False, True, False, True):
        x = rows(4, 4).to_sparse()
        y = x if twice else rows(4, 4).to_sparse()
        torch.testing.assert_close(ours(x, y), eager(x, y))


def test_self_attention():
    """One tensor as query, key and value, and others: all sizes share a graph."""
    eager = nn.MultiheadAttention(8, 2, batch_first=True)
    ours = ORTModule(eager)
    for n in (3, 4, 5):
        x, memory = rows(2, n, 8), rows(2, 6, 8)
        torch.testing.assert_close(ours(x, x, x)[0], eager(x, x, x)[0])
        torch.testing.assert_close(ours(x, memory, memory)[0], eager(x, memory, memory)[0])
    assert explain(ours).captured and explain(ours).exports == 2


# --- tensors of the module --------------------------------------------------------------------------------------------


class Holds(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use
        self.register_buffer("buffer", torch.ones(4, 4))
        self.plain, self.listed, self.held = torch.ones(4, 4), [torch.ones(4, 4)], {"a": torch.ones(4, 4)}

    def forward(self, x):
        return self.use(self, x)


def of(*path):
    def find(module):
        for key in path:
            module = getattr(module, key) if isinstance(key, str) and not isinstance(module, dict) else module[key]
        return module

    return find


PLACES = {
    "parameter": of("linear", "weight"),
    "buffer": of("buffer"),
    "attribute": of("plain"),
    "a list": of("listed", 0),
    "a dictionary": of("held", "a"),
    "a global": lambda _: GLOBAL,
}
QUESTIONS = {
    "is": lambda find: lambda self, x: self.linear(x) * factor(x is find(self)),
    "id": lambda find: lambda self, x: self.linear(x) * factor(id(find(self)) == id(x)),
    "computes": lambda find: lambda self, x: self.linear(x) * factor(x is find(self)) + find(self),
}


@each("place,question", list(itertools.product(PLACES, QUESTIONS)), lambda pair: pair[1] == "is")
@pytest.mark.parametrize("first", [False, True], ids=["other first", "own first"])
def test_a_tensor_of_the_module(place, question, first):
    find = PLACES[place]
    eager = Holds(QUESTIONS[question](find))
    ours = ORTModule(copy.deepcopy(eager))
    for own in (first, not first, first, not first, True, True):

        def arguments(module, own=own):
            x = find(module) if own else rows(4, 4).requires_grad_(place == "parameter")
            return (x,), {}, [x]

        check(eager, ours, arguments)
    if place in ("parameter", "buffer", "attribute"):
        report = explain(ours)
        assert report.captured, report.fallback
        assert report.exports == 2


@pytest.mark.parametrize("written", ["argument", "buffer"])
@pytest.mark.parametrize("place", ["buffer", "plain"])
def test_a_write_is_seen_in_both(place, written):
    def use(self, x):
        (x if written == "argument" else getattr(self, place)).add_(1)
        return self.linear(x) * getattr(self, place)

    eager = Holds(use)
    ours = ORTModule(copy.deepcopy(eager))
    for own in (False, True, False, True, True):

        def arguments(module, own=own):
            x = getattr(module, place) if own else rows(4, 4)
            return (x,), {}, [x]

        check(eager, ours, arguments)
        torch.testing.assert_close(getattr(ours, place), getattr(eager, place))


def test_another_buffer_of_its_kind():
    """The module's tensors may be replaced by others between calls: that one counts which it holds now."""
    eager = Holds(lambda self, x: self.linear(x) * factor(x is self.buffer))
    ours = ORTModule(copy.deepcopy(eager))
    old = {}
    for step in range(6):

        def arguments(module, step=step):
            before = old.get(id(module), module.buffer)
            if step % 2:
                old[id(module)], module.buffer = module.buffer, rows(4, 4, seed=step)
            x = [module.buffer, before, rows(4, 4)][step % 3]
            return (x,), {}, [x]

        check(eager, ours, arguments)
    assert explain(ours).captured


def test_a_shape_of_what_is_held():
    """A graph that takes an argument from an attribute is for its shape and type."""
    eager = Holds(lambda self, x: self.linear(x).sum() * x.shape[0])
    ours = ORTModule(copy.deepcopy(eager))
    for shape, dtype in (
        ((4, 4), torch.float32),
        ((3, 4), torch.float32),
        ((3, 4), torch.float64),
        ((4, 4), torch.float32),
    ):

        def arguments(module, shape=shape, dtype=dtype):
            module.plain = rows(*shape).to(dtype)
            module.to(dtype)
            return (module.plain,), {}, []

        check(eager, ours, arguments)


def test_views_of_one_tensor():
    eager = made(lambda self, x, y: (x.add_(1), self.linear(y))[1])
    ours = ORTModule(eager)
    for view in (lambda x: rows(4, 4), lambda x: x[:], lambda x: x.view(4, 4), lambda x: x.t()):
        results = []
        for module in (ours, eager):
            x = rows(4, 4)
            results.append((module(x, view(x)), x))
        same(*results)


def test_one_that_forward_keeps():
    """Full batches are given again and again, and a module keeps the latest."""

    def use(self, x):
        scale = factor(x is getattr(self, "latest", None))
        self.latest = x
        return self.linear(x) * scale

    eager = Holds(use)
    ours = ORTModule(copy.deepcopy(eager))
    x, y = rows(4, 4), rows(4, 4, seed=1)
    for given in (x, x, x, y, x, y, y):
        torch.testing.assert_close(ours(given), eager(given))


# --- classes of arguments ---------------------------------------------------------------------------------------------


class Sub(torch.Tensor):
    pass


class SubParameter(nn.Parameter):
    pass


CLASSES = {
    "tensor": lambda: rows(4, 4),
    "gradient": lambda: rows(4, 4).requires_grad_(),
    "parameter": lambda: nn.Parameter(rows(4, 4)),
    "frozen": lambda: nn.Parameter(rows(4, 4), requires_grad=False),
    "buffer": lambda: nn.Buffer(rows(4, 4)),
    "subclass": lambda: rows(4, 4).as_subclass(Sub),
    "subclass of parameters": lambda: SubParameter(rows(4, 4)),
}
ASKS = {
    "isinstance": lambda x: isinstance(x, nn.Parameter),
    "isinstance, buffer": lambda x: isinstance(x, nn.Buffer),
    "isinstance, tuple": lambda x: isinstance(x, (Sub, nn.Parameter)),
    "type": lambda x: type(x) is torch.Tensor,
    "type's name": lambda x: type(x).__name__ == "Parameter",
    "issubclass": lambda x: issubclass(type(x), nn.Parameter),
    "__class__": lambda x: x.__class__ is nn.Parameter,
}


@pytest.mark.parametrize("inside", [False, True], ids=["", "in a list"])
@each("asks", list(ASKS), ["isinstance", "isinstance, buffer", "type"])
def test_the_class_of_an_argument(asks, inside):
    question = ASKS[asks]
    eager = made(lambda self, x: self.linear(x[0] if inside else x) * factor(question(x[0] if inside else x)))
    ours = ORTModule(eager)
    for make in (*CLASSES.values(), *reversed(CLASSES.values())):
        given = [make()] if inside else make()
        torch.testing.assert_close(ours(given), eager(given))


ELSEWHERE: dict = {}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), torch.full((4,), 2.0)

    def forward(self, x):
        return self.linear(x) * ELSEWHERE["held"] + self.held


def test_what_an_attribute_and_a_global_hold_is_two_inputs():
    """The attribute may get another tensor, while the global keeps the first one, and the other way round."""
    torch.manual_seed(0)
    module = Twice()
    ours, x = ORTModule(module), torch.randn(2, 4)
    ELSEWHERE["held"] = module.held
    for change in (lambda: None, lambda: setattr(module, "held", torch.zeros(4)), lambda: ELSEWHERE.update(held=x[0])):
        change()
        torch.testing.assert_close(ours(x), module(x))
