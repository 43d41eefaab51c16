"""Attributes that users put on tensors, and what a tensor tells of itself: what forward reads counts at each call."""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.capture.test_tensor_facts import transposed, with_gradient
from tests.selection import each
from tests.twins import made, rows

GLOBAL = torch.ones(4, 4)


class Holds(nn.Module):
    def __init__(self, read, find, used):
        super().__init__()
        self.linear, self.read, self.find, self.used = nn.Linear(4, 4), read, find, used
        self.register_buffer("buffer", torch.ones(4, 4))
        self.plain, self.listed = torch.ones(4, 4), [torch.ones(4, 4)]

    def forward(self, x):
        tensor = self.find(self, x)
        result = self.linear(x) * self.read(tensor)
        return result + tensor if self.used else result


TENSORS = {
    "argument": lambda self, x: x,
    "parameter": lambda self, x: self.linear.weight,
    "buffer": lambda self, x: self.buffer,
    "attribute": lambda self, x: self.plain,
    "list": lambda self, x: self.listed[0],
    "global": lambda self, x: GLOBAL,
}
READS = {
    "getattr": lambda t: getattr(t, "scale", 1.0),
    "hasattr": lambda t: 2.0 if hasattr(t, "scale") else 3.0,
    "try": lambda t: tried(t),
    "vars": lambda t: vars(t).get("scale", 1.0),
    "__dict__": lambda t: 2.0 if "scale" in t.__dict__ else 3.0,
    "isinstance": lambda t: 2.0 if isinstance(getattr(t, "scale", None), float) else 3.0,
}


def tried(tensor):
    try:
        return tensor.scale
    except AttributeError:
        return 7.0


def put(tensor, value):
    """None: it has none."""
    vars(tensor).pop("scale", None)
    if value is not None:
        tensor.scale = value
    return tensor


@each(
    "tensor,read,used",
    list(itertools.product(TENSORS, READS, [False, True])),
    lambda case: case[1] == "getattr" or case[0] == "argument",
)
def test_an_attribute(tensor, read, used):
    find, eager = TENSORS[tensor], Holds(READS[read], TENSORS[tensor], used)
    ours = ORTModule(copy.deepcopy(eager))
    for value in (None, 2.0, 2.0, 3.0, None, 2.0):
        found = []
        for module in (ours, eager):
            x = rows(4, 4)
            put(find(module, x), value)
            found.append(module(x))
        torch.testing.assert_close(*found)
    put(GLOBAL, None)
    report = explain(ours)
    if read in ("vars", "__dict__"):
        assert "reads all attributes of a tensor" in report.fallback
    else:
        assert report.captured, report.fallback
        assert report.exports == 3


VALUES = {
    "list": ([2, 3], [4, 3], lambda v: v[0]),
    "dict": ({"a": 2}, {"a": 5}, lambda v: v["a"]),
    "text": ("row", "column", lambda v: len(v)),
    "type": (int, float, lambda v: 2 if v is int else 3),
    "tensor": (torch.ones(4, 1), torch.zeros(4, 1), lambda v: v),
    "nothing": (None, 2.0, lambda v: 3.0 if v is None else v),
}


@pytest.mark.parametrize("tensor", ["argument", "parameter", "buffer"])
@pytest.mark.parametrize("value", VALUES)
def test_values(tensor, value):
    first, second, read = VALUES[value]
    find = TENSORS[tensor]
    eager = Holds(lambda t: read(t.extra), find, False)
    ours = ORTModule(copy.deepcopy(eager))
    for extra in (first, first, second, first, copy.copy(first)):
        found = []
        for module in (ours, eager):
            x = rows(4, 4)
            find(module, x).extra = extra
            found.append(module(x))
        torch.testing.assert_close(*found)


def test_a_list_that_changes_in_place():
    eager = made(lambda self, x: self.linear(x) * x.sizes[0])
    ours, x = ORTModule(eager), rows(4, 4)
    x.sizes = [2]
    for size in (2, 3, 3, 2):
        x.sizes[0] = size
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).exports == 2


def test_another_parameter_in_its_place():
    eager = made(lambda self, x: self.linear(x) * getattr(self.linear.weight, "scale", 1.0))
    ours, x = ORTModule(eager), rows(4, 4)
    for scale in (None, 2.0, 3.0, 2.0):
        eager.linear.weight = put(nn.Parameter(eager.linear.weight.detach().clone()), scale)
        torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured and explain(ours).exports == 3


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("way", ["set", "setattr", "delete", "counted"])
def test_one_that_forward_sets(tensor, way):
    def use(t):
        if way == "set":
            t.mark = 1.0
        elif way == "setattr":
            setattr(t, "mark", 1.0)  # noqa: B010
        elif way == "delete":
            del t.mark
        else:
            t.mark = getattr(t, "mark", 0.0) + 1.0
        return 2.0

    find, found = TENSORS[tensor], []
    eager = Holds(use, find, False)
    for module in (ORTModule(copy.deepcopy(eager)), eager):
        vars(GLOBAL).pop("mark", None)
        for _ in range(3):
            x = rows(4, 4)
            if way == "delete":
                find(module, x).mark = 5.0
            found.append((module(x).detach(), getattr(find(module, x), "mark", None)))
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours[0], theirs[0])
        assert ours[1] == theirs[1]


def test_attributes_of_results():
    def forward(self, x):
        hidden = self.linear(x)
        hidden.scale = 2.0
        return hidden * hidden.scale

    eager = made(forward)
    ours = ORTModule(eager)
    torch.testing.assert_close(ours(rows(4, 4)), eager(rows(4, 4)))
    assert explain(ours).captured


#: What forward marks: (how, where the mark is then).
MARKED = {
    "the result": (lambda self, y: y, lambda ours, y: y),
    "of two": (lambda self, y: (y * 2, y), lambda ours, y: y[1]),
    "twice": (lambda self, y: (y, y), lambda ours, y: y[0]),
    "in a dictionary": (lambda self, y: {"y": y}, lambda ours, y: y["y"]),
    "an attribute": (lambda self, y: (setattr(self, "kept", y), y * 2)[1], lambda ours, y: ours.kept),
    "no gradient": (lambda self, y: (y.sum(), y), lambda ours, y: y[1]),
}
MARKS = {"float": 3.0, "text": "unguarded", "none": None, "flag": True, "tuple": (1, "a")}


@each("value", MARKS, ("text", "tuple"))
@each("place", MARKED, ("the result", "an attribute"))
def test_marks_of_results(value, place):
    """What forward sets on a tensor that it returns or keeps is there after each call, whatever the caller did to the
    one before."""
    gives, find = MARKED[place]

    def forward(self, x):
        y = self.linear(x)
        y = y.detach() if place == "no gradient" else y
        y.mark = MARKS[value]
        return gives(self, y)

    eager = made(forward)
    ours = ORTModule(copy.deepcopy(eager))
    for n in (4, 4, 3):
        x = rows(n, 4)
        found, expected = ours(x), eager(x)
        marked, plain = find(ours, found), find(eager, expected)
        torch.testing.assert_close(marked, plain)
        assert vars(marked) == vars(plain) == {"mark": MARKS[value]}
        assert marked.requires_grad == plain.requires_grad
        del marked.mark
    report = explain(ours)
    if MARKS[value].__class__ is tuple:
        assert "sets the attribute mark of its result to what is no constant" in report.fallback
    else:
        assert report.captured and not report.pytorch_calls, report.fallback


class Decides(nn.Module):
    """Left to PyTorch, as it decides by chance."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return x * self.read(x) * (1.0 if torch.rand(()) < 0.5 else 1.0)


@pytest.mark.parametrize("read", ["getattr", "hasattr", "try", "vars", "__dict__"])
@pytest.mark.parametrize("first", [True, False])
def test_a_submodule_of_pytorchs_that_reads(read, first):
    torch.manual_seed(0)
    parts = (Decides(READS[read]), nn.Linear(4, 4))
    eager = nn.Sequential(*(parts if first else reversed(parts)))
    ours = ORTModule(copy.deepcopy(eager))
    for value in (None, 2.0, 3.0, None):
        torch.testing.assert_close(ours(put(rows(4, 4), value)), eager(put(rows(4, 4), value)))


# --- what a tensor tells of itself ------------------------------------------------------------------------------------


def shared():
    return rows(4, 4).share_memory_()


def hooked():
    x = rows(4, 4).requires_grad_()
    x.register_hook(lambda grad: grad)
    return x


def kept():
    x = rows(4, 4).requires_grad_() * 1
    x.retain_grad()
    return x


def of_inference():
    with torch.inference_mode():
        return rows(4, 4)


GIVEN = {
    "fresh": lambda: rows(4, 4),
    "shared": shared,
    "part": lambda: rows(6, 4)[1:5],
    "view": lambda: rows(4, 4)[:],
    "transposed": transposed,
    "gradient": lambda: rows(4, 4).requires_grad_(),
    "result": lambda: rows(4, 4).requires_grad_() * 1,
    "second result": lambda: (rows(8, 4).requires_grad_() * 1).split(4)[1],
    "hooked": hooked,
    "kept": kept,
    "with gradient": with_gradient,
    "changed": lambda: rows(4, 4).add_(0),
    "parameter": lambda: nn.Parameter(rows(4, 4)),
    "inference": of_inference,
}
TELLS = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
    "grad": lambda x: x.grad is None,
    "_grad": lambda x: x._grad is None,
    "retains_grad": lambda x: x.retains_grad,
    "output_nr": lambda x: x.output_nr == 0,
    "_version": lambda x: x.is_inference() or x._version == 0,
    "_base": lambda x: x._base is None,
    "_is_view": lambda x: x._is_view(),
    "is_shared": lambda x: x.is_shared(),
    "is_pinned": lambda x: x.is_pinned(),
    "is_inference": lambda x: x.is_inference(),
    "is_contiguous": lambda x: x.is_contiguous(),
    "stride": lambda x: x.stride()[0] == 4,
    "storage_offset": lambda x: x.storage_offset() == 0,
    "storage": lambda x: x.storage().size() == 16,
    "untyped_storage": lambda x: x.untyped_storage().nbytes() == 64,
    "_backward_hooks": lambda x: x._backward_hooks is None,
    "is_set_to": lambda x: x.is_set_to(x[:]),
    "data_ptr": lambda x: x.data_ptr() == x.untyped_storage().data_ptr(),
    "is_conj": lambda x: x.is_conj(),
    "dim_order": lambda x: x.dim_order()[0] == 0,
}


@each("tells", list(TELLS), list(TELLS)[::3])
@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_what_a_tensor_tells(tells, grad):
    question = TELLS[tells]
    eager = made(lambda self, x: self.linear(x) * (2.0 if question(x) else 3.0))
    ours = ORTModule(eager)
    with torch.set_grad_enabled(grad):
        for make in (*GIVEN.values(), *reversed(GIVEN.values())):
            if make is of_inference and grad:  # of these nothing can be differentiated
                continue
            with torch.enable_grad():
                first, second = make(), make()
            torch.testing.assert_close(ours(first), eager(second))


@each("tells", list(TELLS), ["is_leaf", "_base", "stride", "storage_offset"])
def test_what_a_submodule_of_pytorchs_is_told(tells):
    question = TELLS[tells]
    torch.manual_seed(0)
    eager = nn.Sequential(Decides(lambda x: 2.0 if question(x) else 3.0), nn.Linear(4, 4))
    if tells in ("data_ptr", "untyped_storage", "storage"):
        pytest.skip("kernels that PyTorch runs ask for addresses")
    ours = ORTModule(copy.deepcopy(eager))
    for make in GIVEN.values():
        if make is not of_inference:
            torch.testing.assert_close(ours(make()), eager(make()))


def test_a_submodule_that_pytorch_runs_asks_for_what_is_not_there():
    """The graph serves calls whose argument has none; transformers asks so (`hasattr(x, "jax")`)."""

    class Asks(nn.Module):
        def forward(self, x):
            return x * (2.0 if hasattr(x, "halved") else 3.0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.asks, self.linear = Asks(), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(self.asks(x))

    eager = Net()
    eager.asks.register_forward_hook(lambda module, inputs, output: None)
    ours = ORTModule(eager)
    for has in (False, False, True, False):
        x = torch.ones(2, 4)
        if has:
            x.halved = True
        torch.testing.assert_close(ours(x), eager(x))
        if not has:
            assert explain(ours).captured
