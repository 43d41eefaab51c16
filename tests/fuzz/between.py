"""Fuzzes what changes unseen between forward and backward, which gives eager's gradients or an error.

Memory beside a tensor stays what it was.

    python -m tests.fuzz.between [--seconds S] [NUMBER...]
"""

import contextlib
import copy
import os
import sys
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ortmodule import Error, ORTModule
from tests.fuzz.loop import main
from tests.runtime.test_between import Scaled

#: PyTorch is not to compute what the engine refuses: on such memory it reads and writes anywhere.
os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
FENCE, GUARD = 64, 0x5A
ERRORS = (RuntimeError, IndexError, ValueError, TypeError, Error)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(10, 6), nn.LayerNorm(6), nn.Linear(6, 10)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(F.gelu(self.norm(self.table(ids)))).flatten(0, 1), labels.flatten())


class Picks(nn.Module):
    """Indices in every form that has a kernel of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 6))

    def forward(self, x, i):
        rows = self.weight[i]
        picked = torch.gather(x, 1, i[:, :, None].expand(-1, -1, 6) % x.shape[1])
        spread = torch.zeros_like(x).scatter_add(1, i[:, :1, None].expand(-1, 1, 6) % x.shape[1], rows[:, :1])
        return (rows * picked).sum(1) + spread.index_select(1, i[0, :1] % x.shape[1])[:, 0]


class Losses(nn.Module):
    def forward(self, x, labels):
        flat = x.flatten(0, 1)
        return F.nll_loss(flat.log_softmax(-1), labels.flatten()) + F.cross_entropy(
            flat, labels.flatten(), label_smoothing=0.1, ignore_index=3, reduction="sum"
        )


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


IDS, LABELS, ROWS, IMAGE, FLAT = "ids", "labels", "rows", "image", "flat"
KINDS = {
    Scaled: [FLAT], Classifier: [IDS, LABELS], Picks: [ROWS, IDS], Losses: [ROWS, LABELS], Images: [IMAGE],
    Attends: [ROWS],
}  # fmt: skip
#: Of labels and indices: how many there are.
CLASSES = {Classifier: 10, Picks: 10, Losses: 6}


@cache
def models(kind):
    torch.manual_seed(len(kind.__name__))
    model = kind()
    return model, ORTModule(copy.deepcopy(model))


def made(what, batch, length, classes, generator):
    if what in (IDS, LABELS):
        return torch.randint(0, classes, (batch, length), generator=generator)
    shape = {ROWS: (batch, length, 6), IMAGE: (batch, 2, 2 * length, 4), FLAT: (batch, 6)}[what]
    return torch.randn(shape, generator=generator)


class Fenced:
    """A tensor in the middle of memory that is looked at afterwards."""

    def __init__(self, tensor):
        bytes_ = tensor.numel() * tensor.element_size()
        self.memory = torch.full((bytes_ + 2 * FENCE,), GUARD, dtype=torch.uint8)
        self.tensor = self.memory[FENCE : FENCE + bytes_].view(tensor.dtype).view(tensor.shape)
        self.tensor.copy_(tensor)
        self.bytes = bytes_

    def check(self):
        if self.memory.untyped_storage().nbytes() < self.memory.numel():
            return  # it was shrunk: whatever lies there now, sanitizers look at
        before, after = self.memory[:FENCE], self.memory[FENCE + self.bytes :]
        assert (before == GUARD).all() and (after == GUARD).all(), "memory beside a tensor was written"


def put(tensor, number):
    tensor.detach().numpy().reshape(-1)[-1] = number


#: Changes after which eager computes something, or says that it does not.
SOUND = {
    "numpy": lambda t, r: put(t, r.randrange(3)),
    "in place": lambda t, r: t.mul_(0) if r.random() < 0.5 else t.clamp_(0, 1),
    "data in place": lambda t, r: t.data.mul_(2) if t.is_floating_point() else t.data.clamp_(0, 1),
    "data": lambda t, r: setattr(t, "data", t.detach().clone()),
    "other data": lambda t, r: setattr(t, "data", (t.detach() * 0 + 1)),
    "set_": lambda t, r: t.set_((t.detach() * 0 + 2).untyped_storage(), 0, t.shape, t.stride()),
    "nothing": lambda t, r: None,
}
#: Those that PyTorch sees, or that change nothing.
SEEN = {"in place", "nothing"}
#: Changes after which eager itself may read and write anywhere.
HOSTILE = {
    "far": lambda t, r: put(t, r.choice([100_000, -100_000, 1 << 40, -1, -100, 10, 11])),
    "all far": lambda t, r: t.detach().numpy().fill(r.choice([1 << 40, -(1 << 40), 1 << 20])),
    "shrink": lambda t, r: t.untyped_storage().resize_(r.choice([0, 1, 16, 32])),
    "grow": lambda t, r: t.untyped_storage().resize_(t.untyped_storage().nbytes() * 2),
    "smaller data": lambda t, r: setattr(t, "data", t.detach().reshape(-1)[:1].clone()),
    "other shape": lambda t, r: setattr(t, "data", t.detach().reshape(-1).clone()),
    "other type": lambda t, r: setattr(t, "data", t.detach().double()),
    "strides": lambda t, r: setattr(t, "data", torch.as_strided(t.detach(), t.shape, [0] * t.ndim)),
    "view of freed": lambda t, r: free_under(t),
}


def free_under(tensor):
    memory = torch.zeros(tensor.numel() + 100, dtype=tensor.dtype)
    tensor.data = memory[50 : 50 + tensor.numel()].view(tensor.shape)
    memory.untyped_storage().resize_(8)


def targets(model, inputs, names):
    found = dict(zip(names, inputs, strict=True))
    return {**found, **dict(model.named_parameters()), **dict(model.named_buffers())}


def kept(model):
    return [(t, t.data) for t in (*model.parameters(), *model.buffers())]


def step(model, kind, inputs, choose, fence):
    """Forward, a change, backward: the gradients, or an error."""
    tensors = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    if fence:
        boxes = [Fenced(t.detach()) for t in inputs]
        tensors = [b.tensor.requires_grad_(b.tensor.is_floating_point()) for b in boxes]
    before = [(t, t.data, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    y = model(*tensors)
    try:
        with torch.no_grad():
            for which, change, draw in choose:
                with contextlib.suppress(*ERRORS):  # PyTorch does not let it happen
                    change(targets(model, tensors, KINDS[kind])[which], draw())
        (y.square().sum() if y.ndim else y).backward()
        grads = [t.grad for t in (*model.parameters(), *tensors) if t.is_floating_point()]
        return [None if g is None else g.clone() for g in grads]
    except ERRORS as error:
        return str(error)
    finally:
        model.zero_grad()
        for t, data, numbers in before:
            if data.untyped_storage().nbytes() < data.numel() * 4:
                data = torch.empty_like(numbers)
            t.data = data
            t.data.copy_(numbers)
        if fence:
            for box in boxes:
                box.check()


def same(a, b):
    if a is None or b is None:
        return (a is None or not a.any()) and (b is None or not b.any())
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def case(draw):
    kind = draw.choice(list(KINDS))
    eager, ours = models(kind)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    sizes = draw.choice([1, 2, 3]), draw.choice([2, 3])
    inputs = [made(what, *sizes, CLASSES.get(kind, 6), generator) for what in KINDS[kind]]
    hostile = draw.random() < 0.5
    names = list(targets(eager, inputs, KINDS[kind]))
    chosen, told, changed, kinds = [], [], [], []
    for which in draw.sample(
        names, min(len(names), draw.choice([1, 1, 2]))
    ):  # one change each: none writes behind another
        change = draw.choice(list(HOSTILE if hostile else SOUND))
        seed = draw.randrange(1 << 30)
        chosen.append((which, {**SOUND, **HOSTILE}[change], lambda seed=seed: type(draw)(seed)))
        told.append(f"{which}: {change}")
        changed.append(which)
        kinds.append(change)
    found = step(ours, kind, inputs, chosen, fence=True)
    if hostile:
        return
    if isinstance(found, str):
        return
    if any(which in KINDS[kind] and told_of not in SEEN for which, told_of in zip(changed, kinds, strict=True)):
        return  # PyTorch's backward reads an input, or a copy that a kernel made of it (docs/fuzzing.md)
    # Of a parameter that gets other memory PyTorch's backward reads the old one (a product, which saves a view) or the
    # new one (a convolution, a norm); of what the engine does not need it may raise an error.
    some = [chosen[:k] + chosen[k + 1 :] for k in range(len(chosen))] if len(chosen) > 1 else []
    expected = [step(eager, kind, inputs, changes, fence=False) for changes in (chosen, *some, [])]
    expected = [gradients for gradients in expected if not isinstance(gradients, str)]
    relabelled = any(which == LABELS for which, _, _ in chosen)
    for i, (a, *of_eager) in enumerate(zip(found, *expected, strict=True)):
        if relabelled and a is not None and a.isnan().any():
            continue  # a label that counts only now (tests/runtime/test_between.py)
        assert any(same(a, b) for b in of_eager), f"{kind.__name__}, {told}: gradient {i} is {a}, not of {of_eager}"


if __name__ == "__main__":
    sys.exit(main(case, "between", __doc__))
