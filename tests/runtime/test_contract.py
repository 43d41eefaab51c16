"""The module contract: a wrapped module does what PyTorch's does with arguments, results, gradients and memory."""

import copy
import dataclasses
import functools
import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import ModelOutput

from ortmodule import ORTModule, explain
from tests.twins import both, made, rows, same

Point = namedtuple("Point", "a b")


@dataclasses.dataclass
class Batch:
    a: torch.Tensor
    b: object = None
    scale: float = 2.0


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    parts: tuple | None = None


# --- arguments --------------------------------------------------------------------------------------------------------

x, y, z = rows(3, 4), rows(3, 4, seed=1), rows(3, 4, seed=2)


def every(self, a, b=None, *rest, scale=1.0, c, **more):
    total = self.linear(a) * scale + c
    for value in (b, *rest, *more.values()):
        total = total * 0.5 + (0 if value is None else value)
    return total


CALLS = [
    ((x,), {"c": y}),
    ((x, y), {"c": z}),
    ((x, y, z), {"c": z}),
    ((x, y, z, x, 3), {"c": z, "scale": 2.0}),
    ((x, None, z), {"c": z, "d": y}),
    ((x,), {"b": y, "c": z, "d": x}),
    ((), {"a": x, "c": z, "d": None, "e": y}),
    ((), {"a": x, "c": z, "e": y, "d": None}),
    ((), {"e": y, "a": x, "scale": 3.0, "d": z, "c": x}),
    ((), {"d": z, "a": x, "scale": 3.0, "e": y, "c": x}),
]


def test_arguments():
    def scenario(module):
        return [module(*args, **kwargs) for args, kwargs in CALLS for _ in range(2)]

    both(made(every), scenario)


def test_wrong_arguments_are_pytorchs_errors():
    ours = ORTModule(made(every))
    for args, kwargs in (((), {}), ((x,), {}), ((), {"c": y}), ((x,), {"a": x, "c": y})):
        with pytest.raises(TypeError, match="argument"):
            ours(*args, **kwargs)
    ours(x, c=y)
    assert explain(ours).captured


def test_structures_in_and_out():
    def forward(self, batch):
        a = batch["point"].a
        loss = self.linear(a).pow(2).mean()
        return Output(
            loss=loss,
            parts=(
                {"dict": [self.linear(a), None, {"n": a.shape[0]}]},
                Point(a.argmax(-1), batch["batch"].a * batch["batch"].scale),
                Batch(a.detach(), [batch["batch"].b, (loss,)]),
            ),
        )

    def scenario(module):
        found = []
        for n in (3, 5):
            batch = {"point": Point(rows(n, 4), None), "batch": Batch(rows(n, 4, seed=1), "text", 0.5), "unused": [y]}
            output = module(batch)
            (output.loss + output["parts"][0]["dict"][0].sum()).backward()
            found.append(output)
        return found

    both(made(forward), scenario)


def test_inputs_as_outputs_and_twice():
    def forward(self, a, b):
        h = self.linear(a)
        return a, h, h, b, {"again": h, "b": b}

    def scenario(module):
        a = x.clone().requires_grad_()
        out = module(a, y)
        assert out[0] is a and out[1] is out[2] is out[4]["again"] and out[3] is out[4]["b"] is y
        (out[1].sum() + 2 * out[2].sum() + out[0].sum()).backward()
        return out[1], a.grad

    both(made(forward), scenario)


def test_one_tensor_as_two_arguments():
    def scenario(module):
        a = x.clone().requires_grad_()
        module(a, a).sum().backward()
        module(a, y).sum().backward()
        return a.grad

    both(made(lambda self, a, b: self.linear(a) * b), scenario)


def test_inputs_of_every_stride():
    def scenario(module):
        found = []
        wide = rows(8, 8, 3)
        for each in (
            wide[::2, ::2, 0],
            wide[:3, 1:5, 1],
            wide[0, 0, :1, None].expand(3, 4),
            wide[:4, :3, 2].t(),
            x.flip(0),
        ):
            leaf = each.detach().requires_grad_()
            module(leaf).pow(2).sum().backward()
            found.append(leaf.grad)
        return found

    both(made(lambda self, a: self.linear(a.reshape(-1, 4)).tanh()), scenario)


def test_outputs_without_a_gradient():
    def scenario(module):
        h, index, flag, count = module(x)
        assert not (index.requires_grad or flag.requires_grad) and type(count) is int
        h.sum().backward()
        return index, flag, count

    both(made(lambda self, a: (self.linear(a), a.argmax(0), a > 0, len(a))), scenario)


# --- results that are edited ------------------------------------------------------------------------------------------

EDITS = {
    "whole": lambda t: t.mul_(3),
    "a view": lambda t: t.view(-1).add_(1),
    "a part": lambda t: t[0].zero_(),
    "an element": lambda t: t.__setitem__((0, 1), 7.0),
    "a transposed view": lambda t: t.t().mul_(2),
    "by a mask": lambda t: t.masked_fill_(t > 0, 0.5),
    "detached": lambda t: t.detach().add_(1),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_editing_an_output(edit, which):
    """Gradients are right, or an error is raised where PyTorch raises one."""

    def forward(self, a):
        h = self.linear(a)
        return h, h.exp(), h * 2 + 1

    results = []
    eager = made(forward)
    for module in (ORTModule(copy.deepcopy(eager)), eager):
        for _ in range(2):
            module.zero_grad()
            out = module(x)
            EDITS[edit](out[which])
            try:
                (out[0].sum() + out[1].sum() + out[2].pow(2).sum()).backward()
                results.append([out, [p.grad for p in module.parameters()]])
            except RuntimeError as error:
                results.append(str(error)[:60])
    same(results[0], results[2])
    same(results[1], results[3])


VIEWS = {
    "all": lambda self, a, h: h.view(-1),
    "the same": lambda self, a, h: h.view(h.shape),
    "transposed": lambda self, a, h: h.t(),
    "first": lambda self, a, h: h[0],
    "last": lambda self, a, h: h[-1, 1:],
    "from behind": lambda self, a, h: h[-2:, ::2],
    "by twos from behind": lambda self, a, h: h[::2][-1:],
    "repeated": lambda self, a, h: h[:, :1].expand(-1, 3),
    "a square": lambda self, a, h: h.reshape(-1, 2, 2)[:, 1].unsqueeze(1),
    "detached": lambda self, a, h: h.detach()[1:],
    "of an input": lambda self, a, h: a.view(-1)[1:],
    "an input, detached": lambda self, a, h: a.detach(),
    "of a parameter": lambda self, a, h: self.linear.weight[1],
    "diagonal": lambda self, a, h: h[:4].diagonal(),
}


@pytest.mark.filterwarnings("ignore:.*PyTorch runs this module")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("first", [False, True])
def test_results_that_are_views(view, first):
    """Of two results that share memory, an edit of one changes the other; gradients are those of PyTorch."""

    def forward(self, a):
        h = self.linear(a)
        results = h, VIEWS[view](self, a, h)
        return results[::-1] if first else results

    results = []
    eager = made(forward)
    for module in (ORTModule(copy.deepcopy(eager)), eager):
        found = []
        for n in (3, 5, 3, 7):
            module.zero_grad()
            a = rows(n, 4, seed=n).requires_grad_(n == 5)
            out = module(a)
            with torch.no_grad():
                kept = [t.clone() for t in out]
            (out[0].sum() + out[1].sin().sum()).backward()
            with torch.no_grad():
                if view != "repeated":
                    out[1].mul_(3)
                out[0][..., 0] += 1
            found += [*kept, *out, a, a.grad, *[p.grad for p in module.parameters()], *module.parameters()]
            found += [out[i].requires_grad for i in (0, 1)]
        results.append(found)
    same(*results)


def test_views_of_inputs_of_every_stride():
    def scenario(module):
        found = []
        for a in (x, rows(4, 3).t(), rows(6, 8)[:, ::2], rows(1, 4).expand(5, 4)):
            a = a.detach().requires_grad_()
            h, *views = module(a)
            assert all(view.data_ptr() == a.data_ptr() for view in views)
            (h.sum() + views[1].pow(2).sum()).backward()
            found += [h, *views, a.grad, *[view.stride() for view in views]]
        return found

    both(made(lambda self, a: (self.linear(a), a.detach(), a.view_as(a))), scenario)


def test_outputs_and_gradients_are_the_users():
    """What a step returned is not overwritten by a later one while the caller holds it."""

    def scenario(module):
        kept, then = [], []
        for step in range(4):
            a = rows(3, 4, seed=step).requires_grad_()
            out = module(a)
            out.sum().backward()
            kept += [out, a.grad, module.linear.bias.grad]
            then += [t.detach().clone() for t in kept[-3:]]
            module.linear.bias.grad = None
        same([t.detach() for t in kept], then)
        return kept

    both(made(lambda self, a: self.linear(a).tanh()), scenario)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_two_heads_on_one_backbone():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, a):
            h = self.backbone(a)
            return self.one(h), self.two(h), self.backbone(h)

    def scenario(module):
        for part in range(3):
            module(x)[part].sum().backward()
        one, two, _ = module(x)
        one.sum().backward(retain_graph=True)
        two.pow(2).sum().backward()

    torch.manual_seed(0)
    both(Heads(), scenario)


def test_a_shared_backbone_in_two_modules():
    torch.manual_seed(0)
    backbone, heads = nn.Linear(4, 4), [nn.Linear(4, 2), nn.Linear(4, 3)]
    results = []
    for wrap in (ORTModule, lambda m: m):
        parts = copy.deepcopy([backbone, *heads])
        models = [wrap(nn.Sequential(parts[0], nn.Tanh(), head)) for head in parts[1:]]
        losses = [model(x).pow(2).sum() for model in models]
        losses[1].backward()
        losses[0].backward()
        results.append([p.grad for part in parts for p in part.parameters()])
    same(*results)


def test_chained_and_inside():
    torch.manual_seed(0)
    parts = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)]
    results = []
    for wrap in (ORTModule, lambda m: m):
        first, second, third = (wrap(copy.deepcopy(part)) for part in parts)

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.second, self.third = second, third  # noqa: B023

            def forward(self, a):
                return self.third(self.second(a).relu())

        outer = Outer()
        assert list(outer.state_dict())[0] == "second.0.weight"
        outer(first(x)).pow(2).sum().backward()
        results.append([p.grad for m in (first, outer) for p in m.parameters()])
    same(*results)


# --- checkpointing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around(reentrant):
    def scenario(module):
        for part in (0, 1, 0):
            a = x.clone().requires_grad_()
            out = checkpoint(module, a, use_reentrant=reentrant)
            module(a)[1 - part].sum().backward()
            out[part].pow(2).sum().backward()
        return a.grad

    both(made(lambda self, a: (self.linear(a).tanh(), self.linear(a).exp())), scenario)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant):
    def forward(self, a):
        return checkpoint(lambda t: self.linear(t).tanh(), self.linear(a), use_reentrant=reentrant)

    eager = made(forward)
    ours, results = ORTModule(copy.deepcopy(eager)), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (ours, eager):
            for _ in range(3):
                module(x.clone().requires_grad_()).pow(2).sum().backward()
            results.append([p.grad for p in module.parameters()])
    same(*results)
    assert not [w for w in caught if "ORTModule" in str(w.message)]


# --- saved tensors ----------------------------------------------------------------------------------------------------


def test_saved_tensor_hooks():
    """What backward needs goes through autograd: it can be packed away."""
    packed = []

    def scenario(module):
        def pack(t):
            packed.append(t)
            return t.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            value = module(x).pow(2).sum()
        value.backward()

    ours = both(made(lambda self, a: self.linear(a).tanh()), scenario)
    assert packed and ours.linear.weight.grad is not None


def test_functional_call_and_vmap():
    """Transforms of torch.func look at operations: PyTorch runs them."""
    eager = made(lambda self, a: self.linear(a).tanh())
    ours = ORTModule(copy.deepcopy(eager))
    results = []
    for module in (ours, eager):
        state = {k: v * 2 for k, v in module.named_parameters()}
        called = torch.func.functional_call(module, state, (x,))
        mapped = torch.vmap(module)(rows(2, 3, 4))
        grads = torch.func.grad(lambda a: module(a).sum())(x)  # noqa: B023
        results.append([called, mapped, grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_modes_that_watch_operations():
    from torch.utils.flop_counter import FlopCounterMode

    eager = made(lambda self, a: self.linear(a))
    ours = ORTModule(copy.deepcopy(eager))
    counts = []
    for module in (ours, eager):
        module(x)
        with FlopCounterMode(display=False) as counter:
            module(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_default_device():
    ours = ORTModule(made(lambda self, a: self.linear(a)))
    with torch.device("cpu"):
        ours(x)
    assert explain(ours).captured


def test_methods_that_call_forward_in_their_own_way():
    class Generates(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            return self.linear(a)

        def unroll(self, a, n):
            for _ in range(n):
                a = self(a).tanh()
            return a

        def directly(self, a):
            return self.forward(a) * 2

    def scenario(module):
        module.unroll(x, 3).sum().backward()
        module.directly(x).sum().backward()
        functools.partial(module, x)().sum().backward()

    torch.manual_seed(0)
    assert explain(both(Generates(), scenario)).exports == 2  # x itself needs no gradient, what follows does


def test_losses_of_many_kinds():
    def scenario(module):
        labels = torch.tensor([0, 2, 1])
        for loss in (F.cross_entropy(module(x), labels), F.mse_loss(module(x), y), module(x).logsumexp(-1).mean()):
            loss.backward()

    both(made(lambda self, a: self.linear(a)), scenario)


def test_a_named_tuple_whose_class_forward_makes():
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = self.linear(x)
            return namedtuple("Made", "y z")(y, y.sin())

    eager = Makes()
    module = ORTModule(eager)
    for count in (2, 3):
        x = torch.randn(count, 3)
        found = module(x)
        assert type(found).__name__ == "Made" and found._fields == ("y", "z")
        torch.testing.assert_close(tuple(found), tuple(eager(x)))
    assert explain(module).captured and explain(module).exports == 1


def test_a_named_tuple_whose_class_a_function_around_makes():
    """Each module gives its own class's, although they are named alike."""

    def make():
        made = namedtuple("Made", "y z")

        class Gives(nn.Module):
            def forward(self, x):
                return made(x * 2, [made(x, x.sin())])

        return Gives(), made

    for _ in range(2):
        module, cls = make()
        found = ORTModule(module)(torch.ones(3))
        assert type(found) is cls and type(found.z[0]) is cls
