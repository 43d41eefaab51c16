"""Functions that write to several tensors (`torch.max(x, 1, out=(values, indices))`), or make an empty one larger."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain

pytestmark = pytest.mark.filterwarnings("ignore")
LONG = torch.long
#: Functions of (x, out), and the types of their results.
SEVERAL = {
    "max": (lambda x, out: torch.max(x, 1, out=out), (torch.float, LONG)),
    "max, kept": (lambda x, out: torch.max(x, 1, keepdim=True, out=out), (torch.float, LONG)),
    "max, by name": (lambda x, out: torch.max(input=x, dim=1, out=out), (torch.float, LONG)),
    "min": (lambda x, out: torch.min(x, 1, out=out), (torch.float, LONG)),
    "sort": (lambda x, out: torch.sort(x, dim=1, out=out), (torch.float, LONG)),
    "topk": (lambda x, out: torch.topk(x, 2, out=out), (torch.float, LONG)),
    "median": (lambda x, out: torch.median(x, 1, out=out), (torch.float, LONG)),
    "mode": (lambda x, out: torch.mode(x, 1, out=out), (torch.float, LONG)),
    "kthvalue": (lambda x, out: torch.kthvalue(x, 2, out=out), (torch.float, LONG)),
    "cummax": (lambda x, out: torch.cummax(x, 1, out=out), (torch.float, LONG)),
    "aminmax": (lambda x, out: torch.aminmax(x, dim=1, out=out), (torch.float, torch.float)),
    "frexp": (lambda x, out: torch.frexp(x, out=out), (torch.float, torch.int32)),
    "qr": (lambda x, out: torch.linalg.qr(x, out=out), (torch.float, torch.float)),
}
ONE = {
    "mul": lambda x, out: torch.mul(x, 2, out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "sum": lambda x, out: torch.sum(x, 1, out=out),
    "matmul": lambda x, out: torch.matmul(x, x.transpose(1, 2), out=out),
    "stack": lambda x, out: torch.stack([x, x], out=out),
}
#: How memory is made for results that look like these.
MEMORY = {
    "empty": lambda like: like.new_empty(0),
    "sized": torch.empty_like,
    "a part": lambda like: like.new_zeros(like.shape[0] + 1, *like.shape[1:])[1:],
}


class Writes(nn.Module):
    def __init__(self, function, memory, types, way):
        super().__init__()
        self.layer, self.function, self.memory, self.types, self.way = nn.Linear(8, 8), function, memory, types, way

    def forward(self, x):
        h = self.layer(x)
        if self.way == "carries":
            return h, self.written(h)
        with torch.set_grad_enabled(self.way == "detached"):
            result, doubled = self.written(h.detach() if self.way == "detached" else h)
        return h * (1 + sum(t.float().mean() for t in doubled)), (result, doubled)

    def written(self, h):
        plain = self.function(h.detach(), None)
        likes = plain if isinstance(plain, tuple) else (plain,)
        made = [MEMORY[self.memory](like) for like in likes]
        result = self.function(h, tuple(made) if isinstance(plain, tuple) else made[0])
        assert all(a is b for a, b in zip(result if isinstance(plain, tuple) else [result], made, strict=True))
        return result, [t * 2 for t in made]


def compare(function, memory, types, way):
    torch.manual_seed(0)
    model = Writes(function, memory, types, way)
    wrapped = ORTModule(copy.deepcopy(model))
    for rows, length in ((2, 4), (3, 6), (2, 4)):
        x, found = torch.randn(rows, length, 8), []
        for each in (wrapped, model):
            each.zero_grad()
            try:
                h, (result, doubled) = each(x)
            except RuntimeError as error:
                found.append(str(error))
                continue
            h.sum().backward()
            parts = list(result) if isinstance(result, tuple) else [result]
            found.append([type(result), h, *parts, *doubled, *(p.grad for p in each.parameters())])
        ours, theirs = found
        assert type(ours) is type(theirs)
        if isinstance(theirs, str):
            assert ours == theirs
            continue
        assert ours[0] is theirs[0]
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            torch.testing.assert_close(a, b)
            assert a.requires_grad == b.requires_grad
    return explain(wrapped)


@pytest.mark.parametrize("way", ["detached", "no_grad"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", SEVERAL)
def test_several(name, memory, way):
    assert compare(*SEVERAL[name][:1], memory, SEVERAL[name][1], way).captured


@pytest.mark.parametrize("way", ["detached", "no_grad"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", ONE)
def test_one(name, memory, way):
    assert compare(ONE[name], memory, (torch.float,), way).captured


@pytest.mark.parametrize("memory", ["empty", "sized"])
@pytest.mark.parametrize("name", ["max", "sort", "topk"])
def test_what_carries_a_gradient_is_refused(name, memory):
    compare(*SEVERAL[name][:1], memory, SEVERAL[name][1], "carries")


class Keeps(nn.Module):
    """It writes to buffers, of the right sizes or empty ones."""

    def __init__(self, sized):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("values", torch.zeros(2, 8) if sized else torch.empty(0))
        self.register_buffer("places", torch.zeros(2, 8, dtype=LONG) if sized else torch.empty(0, dtype=LONG))

    def forward(self, x):
        h = self.layer(x)
        torch.max(h.detach(), 1, out=(self.values, self.places))
        return h + self.values[:, None]


@pytest.mark.parametrize("sized", [True, False])
def test_into_buffers(sized):
    torch.manual_seed(0)
    model = Keeps(sized)
    wrapped = ORTModule(copy.deepcopy(model))
    for _ in range(3):
        x = torch.randn(2, 4, 8)
        torch.testing.assert_close(wrapped(x), model(x))
        torch.testing.assert_close(wrapped.values, model.values)
        assert torch.equal(wrapped.places, model.places)
    assert explain(wrapped).captured or not sized
