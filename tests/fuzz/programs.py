"""Fuzzes whole programs: a module whose forward is drawn statement by statement, and calls of it, beside eager.

    python -m tests.fuzz.programs [--seconds S] [NUMBER...]

Statements read data in Python, loop over lengths, keep values in attributes, change buffers, leave the graph by
checkpoints, autograd functions and lists, and choose rows; submodules are drawn in the same way. Between calls sizes,
modes, settings of the module, hooks and parameters change. All is in float64, and nothing that torch draws is in it.
"""

import collections
import contextlib
import linecache
import random
import sys
from dataclasses import dataclass, field

import numpy
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from ortmodule import DebugOptions, LogLevel, ORTModule
from ortmodule.core.errors import StateError
from tests.fuzz.loop import main

WIDTH = 6
Pair = collections.namedtuple("Pair", "hidden loss")


class Scaled(torch.autograd.Function):
    """A custom function, whose operands are a tensor and a parameter."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum((0, 1))


class Escapes(nn.Module):
    """Lets a loss escape into a list around the module."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(WIDTH, WIDTH), kept

    def forward(self, x):
        y = self.linear(x).tanh()
        self.kept.append(y.square().mean())
        return y


class Chooses(nn.Module):
    """Chooses one of two ways by its data."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.one(x) if x.mean() > 0.013 else self.two(x) * 0.5


class Experts(nn.Module):
    """A mixture of experts, of which those that are not hit are left out."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            hit = (chosen == number).nonzero()[:, 0]
            if hit.numel():
                found = found.index_add(0, hit, expert(rows[hit]) * weights[hit, None])
        return found.view_as(x)


#: Statements with something of their own, `self.NAME`: h is [batch, length, WIDTH].
WITH_PARTS = {
    "h = self.NAME(h)": [
        "nn.Linear(WIDTH, WIDTH)", "nn.LayerNorm(WIDTH)", "Escapes(KEPT)", "Chooses()",
        "nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))",
    ],
    "h = h + self.NAME(h)": ["Experts()"],
    "h = self.NAME(h.transpose(1, 2)).transpose(1, 2)": [
        "nn.BatchNorm1d(WIDTH)", "nn.Conv1d(WIDTH, WIDTH, 3, padding=1)",
    ],
    "h = h + self.NAME(ids)[:, : h.shape[1]]": ["nn.Embedding(11, WIDTH)"],
    "h = self.NAME(h)[0]": ["nn.GRU(WIDTH, WIDTH, batch_first=True)"],
    "h = h + self.NAME(h, h, h, need_weights=False)[0]": ["nn.MultiheadAttention(WIDTH, 2, batch_first=True)"],
    "h = Scaled.apply(h, self.NAME)": ["nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))"],
    "h = h @ self.NAME": ["nn.Parameter(torch.eye(WIDTH) * 0.9 + 0.05)"],
    "h = checkpoint(self.NAME, h, use_reentrant=False)": ["nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())"],
}  # fmt: skip
#: Statements of any forward.
PLAIN = [
    "h = torch.tanh(h)", "h = F.relu(h) + 0.1 * h", "h = h - h.mean(1, keepdim=True)", "h = F.silu(h)",
    "h = torch.where(h > 0, h, h * 0.2)", "h = h.cumsum(1) * 0.3", "h = h.sort(1)[0]",
    "h = torch.einsum('bld,bmd->blm', h, h).softmax(-1) @ h", "h = h.topk(min(3, h.shape[1]), 1)[0]",
    "a, b = h.chunk(2, -1)\nh = torch.cat([b, a], -1)", "h = h.detach() * 0.5 + h", "h = h.float().double()",
    "if h.sum() > 0.0137:\n    h = h * 1.1\nelse:\n    h = h - 0.3", "if h.shape[1] > 4:\n    h = h * 0.7",
    "if float(h.abs().max()) > 2.5:\n    h = h / h.abs().max()", "if self.training:\n    h = h * 1.05",
    "h = h[:, : int(lengths.max())]", "half = h.shape[1] // 2 + 1\nh = torch.cat([h[:, :half], h[:, :1]], 1)",
    "mask = torch.arange(h.shape[1]) < lengths[:, None]\nh = h * mask[..., None]",
    "mask = torch.arange(h.shape[1]) < lengths[:, None]\nrows = h[mask] - h[mask].mean(0)\n"
    "h = h.masked_scatter(mask[..., None].expand_as(h), rows * 1.2)",
    "state, states = h[:, 0], []\nfor t in range(h.shape[1]):\n    state = torch.tanh(0.5 * state + h[:, t])\n"
    "    states.append(state)\nh = torch.stack(states, 1)",
    "total = 0.0\nfor row in range(h.shape[0]):\n    total = total + h[row].mean()\nh = h + total",
    "h = torch.stack([h[i, : max(1, n)].mean(0) for i, n in enumerate(lengths.tolist())])[:, None] + h",
    "h = nn.utils.rnn.pad_sequence([r[: max(1, int(n))] for r, n in zip(h, lengths)], batch_first=True)",
    "self.kept = h", "self.kept = h.detach()", "self.also = h.mean()", "self.log.append(h.detach().mean())",
    "self.losses['a'] = h.square().mean()", "self.buffer = h.detach().mean((0, 1))", "h = h + self.buffer",
    "if self.before is not None:\n    h = h + 0.1 * self.before\nself.before = h.detach().mean()",
    "self.step += 1\nif self.step % 3 == 0:\n    h = h * 1.3", "self.count += 1\nh = h * (1 + 0.01 * self.count)",
    "self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)\nh = h - self.mean", "h = h * self.factor",
    "with torch.no_grad():\n    self.mean.copy_(0.5 * self.mean + 0.5 * h.mean((0, 1)))\nh = h + 0.1 * self.mean",
    "with torch.no_grad():\n    mean = h.mean()\nh = h - mean", "h = h * (1.5 if torch.is_grad_enabled() else 1.0)",
    "h = h.clone()\nh[:, 0] = 1.0", "h = h.clone()\nh[h > 1] = 0.5", "h = h.clone()\nh[:, :1].mul_(2)",
    "h = h * 1\nh.add_(0.1)", "h = h + 0\nh[:, -1] += h[:, 0].detach()", "h = h.scatter(1, h.argmax(1, True), 0.2)",
    "values = ids.unique()\nh = h + 0.01 * values.sum()", "h = h + F.one_hot(ids[:, : h.shape[1]] % WIDTH, WIDTH)",
    "values, where = ids.unique(return_inverse=True)\nwhere = where[:, : h.shape[1]]\n"
    "h = h + torch.zeros(len(values), WIDTH).index_add(0, where.flatten(), h.flatten(0, 1))[where]",
    "more['loss'] = h.abs().mean()", "more['n'] = more.get('n', 0) + 1\nh = h + 0.01 * more['n']",
    "h = checkpoint(lambda t: torch.tanh(t) * 1.1, h, use_reentrant=False)", "if random.random() < 0.5:\n    h = h + 1",
    "h = h * numpy.random.uniform(0.5, 1.5)",
    "leaf = h.detach().requires_grad_()\nwith torch.enable_grad():\n"
    "    (g,) = torch.autograd.grad((leaf**2).sum(), leaf)\nh = h - 0.1 * g",
]  # fmt: skip
#: Those of the outermost forward, and of submodules, alone.
OF_ARGUMENTS = ["h = h * w", "h = h + w**2", "if flag:\n    h = h * 2", "if also is not None:\n    h = h + also.mean()"]
OF_PARTS = ["KEPT.append(h.mean())"]
CALLS = [
    "h = self.NAME(h, ids, lengths, more)", "h = self.NAME(h, ids, lengths, more=more)",
    "h = h + self.NAME(h, ids, lengths, more).mean(1, keepdim=True)",
]  # fmt: skip
RETURNS = [
    "h", "h, h.mean()", "{'hidden': h, 'loss': h.square().mean()}", "h, ids", "h, h[:, 0], (h * 2).detach()", "h, h",
    "h, [h.sum(), {'mean': h.mean(1)}]", "Pair(h, h.mean())", "h, x", "h, self.mean", "h.shape[1], h",
]  # fmt: skip
CLASS = """
class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = self.also = self.before = None
        self.log, self.losses, self.step, self.factor = [], {{}}, 0, 1.25
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.buffer = torch.ones(WIDTH)
        {parts}

    def forward(self, {arguments}):
        {body}
"""


#: What statements call.
NAMES = {"F": functional, "nn": nn, "WIDTH": WIDTH} | {
    each.__name__: each for each in (torch, numpy, random, checkpoint, Pair, Scaled, Escapes, Chooses, Experts)
}


def drawn_class(r, name, arguments, statements, least, most, parts=()):
    """The source of a class, whose ``parts`` (by their classes' names) some statements call."""
    made, body = [f"self.{part.lower()} = {part}()" for part in parts], []
    for number in range(r.randint(least, most)):
        if r.random() < 0.4:
            text, kinds = r.choice([*WITH_PARTS.items()])
            made.append(f"self.own{number} = {r.choice(kinds)}")
            body.append(text.replace("NAME", f"own{number}"))
        else:
            body.append(r.choice(statements))
        if parts and r.random() < 0.5:
            body.append(r.choice(CALLS).replace("NAME", r.choice(parts).lower()))
    made.append("self.last = nn.Linear(WIDTH, WIDTH)")
    body.append("h = self.last(h)")
    body.append("return " + (r.choice(RETURNS) if name == "Whole" else "h"))
    indented = (text.replace("\n", "\n        ") for text in ("\n".join(made), "\n".join(body)))
    return CLASS.format(name=name, arguments=arguments, parts=next(indented), body=next(indented))


def drawn_source(r):
    parts = [f"Part{number}" for number in range(r.choice([0, 1, 1, 2, 3]))]
    given = "h, ids, lengths, more"
    source = "".join(drawn_class(r, name, given, PLAIN + OF_PARTS, 1, 4) for name in parts)
    whole = drawn_class(
        r, "Whole", "x, ids, lengths, more, w=1.0, flag=False, also=None", PLAIN + OF_ARGUMENTS, 2, 6, parts
    )
    return source + whole.replace("also=None):\n", "also=None):\n        h = x\n")


@dataclass
class Side:
    """One of the two: the module that is called, its parts, and the list that these let losses escape into."""

    called: nn.Module
    module: nn.Module
    escaped: list
    handles: list = field(default_factory=list)

    def state(self):
        own = [part for part in self.module.modules() if hasattr(part, "losses")]
        kept = [[part.kept, part.also, part.log, part.losses, part.before, part.step, part.buffer] for part in own]
        return [dict(self.module.named_buffers()), kept, self.escaped]


def sides_of(source, number):
    file = f"<program {number}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    made = []
    for _ in range(2):
        escaped = []
        space = {**NAMES, "KEPT": escaped, "__name__": "tests.fuzz.drawn"}
        exec(compile(source, file, "exec"), space)
        torch.manual_seed(number)
        module = space["Whole"]()
        made.append(Side(module, module, escaped))
    made[1].called = ORTModule(made[1].module, DebugOptions(log_level=LogLevel.FATAL))
    return made


# --- what is compared -------------------------------------------------------------------------------------------------


def leaves_of(value):
    """What a value consists of, in order."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in (key, *leaves_of(each))]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(leaf for each in value for leaf in leaves_of(each))]
    return [value]


def tensors_with_gradients(value):
    return [t for t in leaves_of(value) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_floating_point()]


def assert_same(found, expected, what):
    found, expected = leaves_of(found), leaves_of(expected)
    assert len(found) == len(expected), f"{what}: {found}, not {expected}"
    for ours, theirs in zip(found, expected, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert type(ours) is type(theirs) and ours == theirs, f"{what}: {ours}, not {theirs}"
            continue
        assert isinstance(ours, torch.Tensor) and ours.requires_grad == theirs.requires_grad, f"{what}: {ours}"
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda m: f"{what}: {m}")


def loss_of(value, kept):
    tensors = tensors_with_gradients([value, kept])
    weights = [torch.cos(torch.arange(t.numel()).view(t.shape) + i) for i, t in enumerate(tensors)]
    return sum((t * weight).sum() for t, weight in zip(tensors, weights, strict=True))


# --- a program --------------------------------------------------------------------------------------------------------


CHANGES = ["train", "eval", "step", "factor", "freeze", "hook", "unhook", "load", "data", "forget"]


def change(r, sides):
    """What happens between calls."""
    what = r.choice(
        ["", "", "", "train", "eval", "step", "factor", "freeze", "hook", "unhook", "load", "data", "forget"]
    )
    number, factor = r.randrange(100), r.uniform(0.5, 2)
    state = {name: t + 0.01 if t.is_floating_point() else t for name, t in sides[0].module.state_dict().items()}
    for side in sides:
        module, parameters = side.module, list(side.module.parameters())
        if what in ("train", "eval"):
            side.called.train(what == "train")
        elif what == "step":
            torch.optim.SGD(parameters, 0.01).step()
        elif what == "factor":
            module.factor = factor
        elif what == "freeze":
            chosen = parameters[number % len(parameters)]
            chosen.requires_grad_(not chosen.requires_grad)
        elif what == "hook":
            last, kept = [*module.children()][-1], side.escaped
            side.handles.append(last.register_forward_hook(lambda _, given, made, kept=kept: kept.append(made.mean())))
        elif what == "unhook":
            while side.handles:
                side.handles.pop().remove()
        elif what == "load":
            module.load_state_dict(state)
        elif what == "data":
            for parameter in parameters:
                parameter.data = parameter.data * 1.01
        elif what == "forget":
            module.before, module.step = None, 0


@dataclass
class Call:
    """Sizes and arguments of a call, and the mode that it runs in."""

    seed: int
    shape: tuple[int, int]
    wants_gradient: bool
    w: float
    flag: bool
    also: bool
    mode: str

    def run(self, side):
        """(what it returns, what it put into its dictionary, its input), or the error."""
        generator = torch.Generator().manual_seed(self.seed)
        batch, length = self.shape
        x = torch.randn(batch, length, WIDTH, generator=generator)
        also = torch.randn(3, generator=generator) if self.also else None
        ids = torch.randint(0, 11, self.shape, generator=generator)
        lengths = torch.randint(1, length + 1, (batch,), generator=generator)
        random.seed(self.seed)
        numpy.random.seed(self.seed)
        more, modes = {}, {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        x.requires_grad_(self.wants_gradient)
        try:
            with modes.get(self.mode, contextlib.nullcontext)():
                return side.called(x, ids, lengths, more, w=self.w, flag=self.flag, also=also), more, x
        except Exception as error:
            return error


def gradients(side, calls, way, with_kept):
    """Of the input and parameters, after ``calls``; or the error."""
    inputs = [x for _, _, x in calls if x.requires_grad]
    leaves = [t for t in (*inputs, *side.module.parameters()) if t.requires_grad]
    side.module.zero_grad()
    kept = [side.state()[1:], [more for _, more, _ in calls]] if with_kept else []
    loss = loss_of([result for result, _, _ in calls], kept)
    if not isinstance(loss, torch.Tensor):
        return []
    try:
        if way == "some":
            return torch.autograd.grad(loss, leaves[:2], allow_unused=True)
        if way == "twice":
            found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            again = sum(g.square().sum() for g in found if g is not None)
            if isinstance(again, torch.Tensor) and again.requires_grad:
                again.backward()
            return [None if g is None else g.detach() for g in found] + [t.grad for t in leaves]
        if way == "retained":
            loss.backward(retain_graph=True)
        loss.backward()
    except Exception as error:
        return error
    return [t.grad for t in leaves]


def case(r):
    """Why nothing, or little, was compared."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _case(r)
    finally:
        torch.set_default_dtype(before)


def _case(r):
    source = drawn_source(r)
    eager, ours = sides = sides_of(source, r.randrange(1 << 30))
    with_kept = r.random() < 0.5
    for number in range(r.randint(4, 9)):
        change(r, sides)
        mode = r.choice(["", "", "", "", "", "no_grad", "inference"])
        count = 2 if not mode and r.random() < 0.2 else 1
        drawn = [
            Call(r.randrange(1 << 30), (r.choice([1, 2, 3]), r.choice([2, 3, 5, 5, 7])), r.random() < 0.5,
                 r.choice([1.0, 1.0, r.uniform(0.5, 2)]), r.random() < 0.2, r.random() < 0.2, mode)
            for _ in range(count)
        ]  # fmt: skip
        what = f"{source}\ncall {number}, {drawn}"
        results = []
        for side in sides:
            side.escaped.clear()
            results.append([call.run(side) for call in drawn])
        for theirs, found in zip(*results, strict=True):
            if isinstance(theirs, Exception) or isinstance(found, Exception):
                assert type(theirs) is type(found), f"{what}: {found!r}, not {theirs!r}"
                return "errors"
            if count == 1:
                assert_same(found[:2], theirs[:2], what)
        assert_same(ours.state(), eager.state(), f"{what}: afterwards")
        if mode:
            continue
        way = r.choice(["", "", "", "", "retained", "some", "twice"])
        theirs, found = (gradients(side, calls, way, with_kept) for side, calls in zip(sides, results, strict=True))
        if isinstance(found, StateError):
            return "second gradients that are refused"
        if isinstance(theirs, Exception) or isinstance(found, Exception):
            if "flash_attention_for_cpu_backward" in str(theirs) or isinstance(theirs, CheckpointError):
                return "gradients that PyTorch does not have"
            assert type(theirs) is type(found), f"{what}: {found!r}, not {theirs!r}"
            return "errors in backward"
        assert_same(found, theirs, f"{what}: gradients, {way or 'as always'}")
        assert_same(ours.state(), eager.state(), f"{what}: behind backward")
    return None


if __name__ == "__main__":
    sys.exit(main(case, "programs", __doc__))
