"""Forward's helpers change classes, variables and tensors that no code of a module names, as often as in PyTorch.

Each call of a captured module changes as much as one of PyTorch's, and reads what PyTorch's reads, in later captures,
too.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.capture import counted_by_helpers
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")
ATTRIBUTES = ("count", "latest", "losses", "total", "calls")  # of the classes of modules
CALLS = ((2, 4, True), (2, 4, True), (3, 6, True), (2, 5, False), (2, 4, True))
TOTALS = {}
RUNNING, TEACHER = torch.zeros(4, dtype=torch.float64), [nn.Linear(4, 4).double()]


class Base(nn.Module):
    count, latest, losses, total = 0, None, [], 0.0


class Part(Base):
    """``use`` is a function of the module, of what it computes and of a loss; what it returns is a factor."""

    def __init__(self, use):
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x):
        y = self.linear(x).tanh()
        factor = self.use(self, y, y.square().mean())
        return y if factor is None else y * factor


class Whole(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), Part(use), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.part(self.first(x))).sum()


class Itself(Part):
    def forward(self, x):
        return super().forward(x).sum()


def counts(module, y, loss):
    type(module).count += 1


def counts_and_reads(module, y, loss):
    type(module).count += 1
    return type(module).count


def sets(module, y, loss):
    module.__class__.latest = loss


def sets_once(module, y, loss):
    if type(module).latest is None:
        type(module).latest = loss.detach()
    return 1 + type(module).latest


def sets_new(module, y, loss):
    type(module).calls = getattr(type(module), "calls", 0) + 1


def joins(module, y, loss):
    type(module).losses = [*type(module).losses, loss]


def adds(module, y, loss):
    type(module).total = 0.5 * type(module).total + loss.detach()


def appends(module, y, loss):
    type(module).losses.append(loss)


def function_of_a_module(module, y, loss):
    return counted_by_helpers.count()


def class_of_a_module(module, y, loss):
    counted_by_helpers.Totals.add(loss)


def new_variable(module, y, loss):
    counted_by_helpers.remember(y.shape[0])


def tensor_in_a_dictionary(module, y, loss):
    TOTALS["loss"] += loss


def tensor_without_gradient(module, y, loss):
    RUNNING.mul_(0.9).add_(y.detach().mean((0, 1)))
    return 1 + RUNNING.sum()


def part_of_a_tensor(module, y, loss):
    RUNNING[1] += loss.detach()


def out(module, y, loss):
    torch.add(RUNNING, loss.detach(), out=RUNNING)


def data(module, y, loss):
    RUNNING.data.add_(loss.detach())


def alias(module, y, loss):
    RUNNING.detach()[1:].sub_(loss.detach())


def array(module, y, loss):
    RUNNING.numpy()[0] += 1


def teacher(module, y, loss):
    with torch.no_grad():
        for parameter in TEACHER[0].parameters():
            parameter.mul_(0.9).add_(loss.detach() * 0.1)
    return TEACHER[0](y.detach()).mean()


USES = {
    use.__name__: use
    for use in (
        counts, counts_and_reads, sets, sets_once, sets_new, joins, adds, appends, function_of_a_module,
        class_of_a_module, new_variable, tensor_in_a_dictionary, tensor_without_gradient, part_of_a_tensor, out, data,
        alias, array, teacher,
    )
}  # fmt: skip


def begin():
    for cls in (Part, Itself):
        for name in vars(cls).keys() & {*ATTRIBUTES}:
            delattr(cls, name)
    Base.losses.clear()
    counted_by_helpers.CALLS = counted_by_helpers.Totals.count = 0
    counted_by_helpers.LATEST.clear()
    vars(counted_by_helpers).pop("MADE", None)
    TOTALS["loss"] = torch.zeros((), dtype=torch.float64)
    RUNNING.zero_()
    for parameter in TEACHER[0].parameters():
        parameter.data.fill_(0.5)


def seen():
    """All of it now."""
    classes = [vars(cls).get(name, -1) for cls in (Part, Itself) for name in ATTRIBUTES]
    others = counted_by_helpers.CALLS, counted_by_helpers.Totals.count, counted_by_helpers.LATEST
    named = {"made": vars(counted_by_helpers).get("MADE"), "totals": TOTALS, "running": RUNNING}
    return [*classes, list(Base.losses), *others, named, [p.detach() for p in TEACHER[0].parameters()]]


def flat(value):
    if isinstance(value, dict):
        return flat(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


def run(wrap, place, use):
    begin()
    torch.manual_seed(0)
    module = wrap(place(USES[use]).double())
    found = []
    for step, (rows, length, train) in enumerate(
        ((2, 4, True), (2, 4, True), (3, 6, True), (2, 5, False), (2, 4, True))
    ):
        x = torch.randn(rows, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        module.train(train)
        module.zero_grad()
        loss = module(x)
        now = flat(seen())
        new = [each for each in now if isinstance(each, torch.Tensor) and each.requires_grad]
        (loss + sum(each.square() for each in new)).backward(retain_graph=bool(new))
        values = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in now]
        grads = [p.grad if p.grad is None else p.grad.clone() for p in module.parameters()]
        found.append([loss.detach(), values, [bool(getattr(each, "requires_grad", False)) for each in now], grads])
    begin()
    return module, found


ALL = list(itertools.product((Whole, Itself), USES))
SHORT = [(Whole, "counts_and_reads"), (Itself, "sets_once"), (Whole, "tensor_in_a_dictionary"), (Whole, "teacher")]


@each("place, use", ALL, SHORT)
def test_each_call_changes_what_pytorchs_does(place, use):
    _, expected = run(lambda module: module, place, use)
    module, found = run(ORTModule, place, use)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    if place is Whole:
        assert explain(module).captured, explain(module).fallback


def test_a_class_has_no_attribute_that_it_had_from_another():
    """A capture takes away what forward sets in it: what the other class has later is seen."""
    begin()
    eager = Whole(lambda part, y, loss: float(type(part).count))
    module = ORTModule(copy.deepcopy(eager))
    x = torch.ones(2, 3, 4)
    try:
        for Base.count in (2, 2, 3):
            torch.testing.assert_close(module(x), eager(x))
        assert "count" not in vars(Part)
    finally:
        Base.count = 0
