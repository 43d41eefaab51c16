"""What a hook leaves behind, and forward reads: never the value of an earlier step."""

import copy
import warnings

import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

SHARED = {}


class Leaves:
    """A hook that is an object."""

    def __init__(self, module):
        self.module = module

    def __call__(self, module, args, out):
        self.module.extra = out.detach()


class Net(nn.Module):
    """Its forward adds what a hook on ``a`` has left somewhere."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left, self.kept, self.calls = None, {}, []
        self.a.out = self.b.extra = None
        self.b.factor, self.parts = 0.5, nn.ModuleList([nn.Identity()])
        self.parts[0].found = {"a": torch.ones(4)}
        self.register_buffer("mean", torch.zeros(4))
        self.a.register_forward_hook(getattr(self, f"_{kind}_hook", None) or self._closure())

    def _closure(self):
        kept, calls, b = self.kept, self.calls, self.b
        hooks = {
            "item": lambda m, args, out: kept.__setitem__("a", out.detach()),
            "count": lambda m, args, out: calls.append(1),
            "shared": lambda m, args, out: SHARED.__setitem__("a", out.detach()),
            "other": lambda m, args, out: setattr(b, "extra", out.detach()),
            "walked": lambda m, args, out: setattr(self.get_submodule("b"), "extra", out.detach()),
            "indexed": lambda m, args, out: self.parts[0].found.__setitem__("a", out.detach().mean(0)),
            "object": Leaves(b),
        }
        return hooks[self.kind]

    def _number_hook(self, module, args, out):
        self.b.factor = float(out.detach().mean())

    def _attribute_hook(self, module, args, out):
        self.left = out.detach()

    def _own_hook(self, module, args, out):
        module.out = out.detach()

    def _buffer_hook(self, module, args, out):
        self.mean.mul_(0.9).add_(out.detach().mean(0))

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        if self.kind == "number":
            return y + self.b.factor
        if self.kind == "indexed":
            return y + self.parts[0].found["a"]
        if self.kind == "count":
            return y * len(self.calls)
        if self.kind == "buffer":
            return y + self.mean
        found = {
            "attribute": self.left, "item": self.kept.get("a"), "shared": SHARED.get("a"), "own": self.a.out,
        }.get(self.kind, self.b.extra)  # fmt: skip
        return y if found is None else y + found


KINDS = ["attribute", "item", "count", "shared", "other", "own", "buffer", "walked", "indexed", "object", "number"]
BEFORE = [(kind, called_before) for called_before in (False, True) for kind in KINDS]


@each("kind, called_before", BEFORE, lambda case: not case[1] or case[0] in ("attribute", "count"))
def test_what_hooks_leave_for_forward(kind, called_before):
    results = []
    for wrap in (ORTModule, lambda module: module):
        SHARED.clear()
        torch.manual_seed(0)
        module = Net(kind)
        if called_before:
            module(torch.ones(3, 4))
        module = wrap(module)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(4):
                module.zero_grad()
                y = module(torch.randn(3, 4, generator=torch.Generator().manual_seed(step)))
                y.sum().backward()
                found += [y, *(p.grad for p in module.parameters())]
        results.append(found)
    torch.testing.assert_close(*results)


def test_what_hooks_leave_for_others():
    """Hooks that forward knows nothing of leave the module in the engine."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.scale, self.seen = nn.Linear(4, 4), nn.LayerNorm(4), 2.0, []

        def watch(self, module, args, out):
            self.seen.append((self.scale, module.eps, out.mean().item()))

        def forward(self, x):
            return self.norm(self.a(x)) * self.scale

    torch.manual_seed(0)
    eager = Plain()
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (ours, eager):
            module.norm.register_forward_hook(module.watch)
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            torch.testing.assert_close(ours(x), eager(x))
    assert explain(ours).captured and explain(ours).python_ops == ["norm"]
    torch.testing.assert_close(ours.seen, eager.seen)
