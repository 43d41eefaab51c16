"""Gradients through what a hook keeps are PyTorch's, and the engine runs the rest of the module."""

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from tests.selection import each

KEPT: dict = {}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1))


class Keeper:
    def __init__(self):
        self.features = []

    def hook(self, module, inputs, output):
        self.features.append(output)
        KEPT["h"] = self.features[-1]


def global_item(module, inputs, output):
    KEPT["h"] = output


def through_a_local(module, inputs, output):
    (x,) = inputs
    pair = [x, output * 2]
    for one in pair:
        KEPT["h"] = one


def through_a_function(module, inputs, output):
    store(output)


def store(tensor):
    KEPT["h"] = tensor


def by_setattr(module, inputs, output):
    module.kept = output
    KEPT["h"] = module.kept


def penalty(module, inputs, output):
    KEPT.setdefault("losses", []).append(output.square().mean())
    KEPT["h"] = KEPT["losses"][-1]


def closure():
    kept = KEPT

    def hook(module, inputs, output):
        kept.update(h=output)

    return hook


KEEP = {
    "an item of a global": global_item,
    "through a local variable": through_a_local,
    "through a function": through_a_function,
    "an attribute": by_setattr,
    "a loss": penalty,
    "a closure": closure(),
    "a method": Keeper().hook,
    "a lambda": lambda module, inputs, output: KEPT.update(h=output),
}


ALL = [(name, at, alone) for name in KEEP for at in ("1", "1.0", "0") for alone in (True, False)]


@each("name, at, alone", ALL, lambda case: case[1] == "1" and case[2])
def test_gradients_through_what_a_hook_keeps(name, at, alone):
    found = []
    for wrap in (lambda module: module, ORTModule):
        KEPT.clear()
        module = wrap(model())
        module.get_submodule(at).register_forward_hook(KEEP[name])
        for _ in range(2):
            module.zero_grad()
            y = module(torch.ones(2, 3)).sum()
            (KEPT["h"].square().sum() + (0 if alone else y)).backward()
        found.append([p.grad for p in module.parameters()])
    for ours, eager in zip(found[1], found[0], strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager)
    report = explain(module)
    assert report.captured and report.breaks == [at] and report.exports == 1


def test_a_pre_hook_that_keeps_the_input():
    found = []
    for wrap in (lambda module: module, ORTModule):
        module = wrap(model())
        module[1].register_forward_pre_hook(lambda module, inputs: KEPT.update(h=inputs[0]))
        (module(torch.ones(2, 3)).sum() + KEPT["h"].square().sum()).backward()
        found.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(found[1], found[0])


STATISTICS: dict = {}


def shapes(module, inputs, output):
    STATISTICS["shape"] = output.shape, [tuple(x.size()) for x in inputs]


def means(module, inputs, output):
    with torch.no_grad():
        STATISTICS["mean"] = output.float().mean().item()
    STATISTICS["norm"] = float(torch.linalg.norm(inputs[0]))


def detached(module, inputs, output):
    y = output.detach()
    STATISTICS["last"] = y if y.numel() else None


def says(module, inputs, output):
    print(f"{type(module).__name__}: {output.shape}, {len(inputs)}")


def scales(module, inputs, output):
    STATISTICS["calls"] = STATISTICS.get("calls", 0) + 1
    return output * 0.5


@pytest.mark.parametrize("hook", [shapes, means, detached, says, scales])
def test_a_hook_that_keeps_none_leaves_the_module_in_the_engine(hook):
    eager = model()
    eager[1].register_forward_hook(hook)
    module = ORTModule(eager)
    x = torch.ones(2, 3)
    torch.testing.assert_close(module(x), eager(x))
    assert explain(module).captured


def test_without_gradients_a_hook_may_keep_what_it_likes():
    eager = model()
    eager[1].register_forward_hook(global_item)
    module = ORTModule(eager)
    with torch.no_grad():
        torch.testing.assert_close(module(torch.ones(2, 3)), eager(torch.ones(2, 3)))
    assert explain(module).captured
