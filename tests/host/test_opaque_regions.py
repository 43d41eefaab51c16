"""What cannot be captured is the smallest submodule's matter: PyTorch runs it inside the graph."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortmodule import ORTModule, explain


class Layer(nn.Module):
    """A linear layer, and around its result what ``change`` does."""

    def __init__(self, change=None):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.change = change

    def forward(self, x):
        y = self.linear(x)
        return x + self.norm(y if self.change is None else self.change(self, y))


class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Layer(), Layer(change), Layer()])
        self.after = nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        x = self.before(x).tanh()
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def rows(n, seed=0):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(module, x):
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    random.seed(2)
    y = module(x)
    y.pow(2).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters()), *(b.clone() for b in module.buffers())]


def check(eager, names, sizes=(4, 6, 3, 4), exports=1):
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, n in enumerate(sizes):
            torch.testing.assert_close(step(ours, rows(n, i)), step(eager, rows(n, i)))
    report = explain(ours)
    assert report.captured and report.python_ops == names, report
    assert exports is None or report.exports == exports
    told = [str(w.message) for w in caught if "inside the graph" in str(w.message)]
    assert len(told) == len(names) and all(any(f" {name} " in text for text in told) for name in names)
    return told


def _branches(layer, y):
    return y * 2 if y.sum().item() > 0 else y - 1


def _reads_much(layer, y):
    return y * max(max(row) for row in y.detach().tolist())


def _draws(layer, y):
    return y * 2 if random.randrange(1, 9) > 4 else y


def _drops(layer, y):
    return y if torch.rand([]) < 0.5 else nn.functional.dropout(y, 0.3)


def _hooks_a_gradient(layer, y):
    y = y * 1
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)
    return y


def _differentiates(layer, y):
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        return y * torch.autograd.grad(z.pow(3).sum(), z)[0]


def _uses_numpy(layer, y):
    return y * float(y.detach().numpy().std())


CHANGES = [_reads_much, _draws, _drops, _hooks_a_gradient, _differentiates, _uses_numpy]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_the_smallest_submodule(change):
    torch.manual_seed(0)
    told = check(Net(change), ["layers.1"], sizes=(24, 30, 21, 24))
    assert "layers.1" in told[0]


def test_a_comparison_with_data_alone():
    """Its result is compared in each run, and no submodule is left to PyTorch."""
    eager = Net(_branches)
    ours = ORTModule(copy.deepcopy(eager))
    for sign in (1, -1, 1, -1):
        x = sign * rows(5).abs()
        torch.testing.assert_close(ours(x), eager(x))
        assert explain(ours).captured and not explain(ours).python_ops
    assert explain(ours).exports <= 2


def test_file_and_line_are_told():
    torch.manual_seed(0)
    (text,) = check(Net(_reads_much), ["layers.1"], sizes=(8, 6))
    assert f"{__file__}:{_reads_much.__code__.co_firstlineno + 1}" in text


def test_no_other_layer_is_left_when_all_fail():
    torch.manual_seed(0)
    eager = Net(None)
    for layer in eager.layers:
        layer.change = _reads_much
    check(eager, ["layers.0", "layers.1", "layers.2"], sizes=(8, 6, 8))


def test_the_policy_may_forbid_it(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    ours = ORTModule(Net(_differentiates))
    with pytest.raises(Exception, match="differentiates inside forward"):
        ours(rows(4))


def _makes_a_leaf(layer, y):
    bias = torch.zeros(y.shape[-1], requires_grad=y.requires_grad)
    return checkpoint(lambda t: torch.sin(t + bias), y, use_reentrant=False)


def test_a_leaf_of_its_own():
    torch.manual_seed(0)
    check(Net(_makes_a_leaf), [])


def _checkpoints_all(layer, y):
    return checkpoint(torch.sin, y, use_reentrant=True)


def _checkpoints_what_draws(layer, y):
    return checkpoint(torch.sin, y * random.random() if y.sum().item() else y, use_reentrant=True)


@pytest.mark.parametrize("change", [_checkpoints_all, _checkpoints_what_draws], ids=lambda f: f.__name__)
def test_reentrant_checkpoints(change):
    """Graphs have them. Nodes they could not be: their backward refuses to be asked for the gradients of a part."""
    torch.manual_seed(0)
    eager = Net(change)
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(3):
            random.seed(i)
            found = step(ours, rows(5, i))
            random.seed(i)
            torch.testing.assert_close(found, step(eager, rows(5, i)))
    assert explain(ours).captured and "layers.1" not in explain(ours).python_ops, explain(ours)


def test_train_and_eval():
    torch.manual_seed(0)
    eager = Net(_branches)
    ours = ORTModule(copy.deepcopy(eager))
    for training in (True, False, True):
        for module in (ours, eager):
            module.train(training)
        torch.testing.assert_close(step(ours, rows(5)), step(eager, rows(5)))
    for module in (ours, eager):
        module.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(rows(3)), eager(rows(3)))


def test_frozen_and_unused_parameters():
    torch.manual_seed(0)
    eager = Net(_branches)
    eager.layers[1].linear.bias.requires_grad_(False)
    eager.layers[1].spare = nn.Linear(3, 3).double()
    ours = ORTModule(copy.deepcopy(eager))
    for i in range(3):
        found = []
        for module in (ours, eager):
            module.zero_grad()
            module(rows(4, i)).sum().backward()
            found.append({name: p.grad for name, p in module.named_parameters()})
        assert [k for k, g in found[0].items() if g is None] == [k for k, g in found[1].items() if g is None]
        torch.testing.assert_close(*[{k: g for k, g in f.items() if g is not None} for f in found])


class _Encodes(nn.Module):
    """Two results, the second of which knows no gradient; operators between here and where it is used."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return y * float(y.detach().numpy().std()), y.detach() + 1


class _Decodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, y, places):
        y = self.linear(y + places)
        return y * float(y.detach().numpy().std())


class _EncodesAndDecodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _Encodes(), _Decodes()
        self.double()

    def forward(self, x):
        y, places = self.encoder(x)
        return self.decoder(y, places.tanh())


def test_what_knows_no_gradient_between_two_of_them():
    torch.manual_seed(0)
    check(_EncodesAndDecodes(), ["decoder", "encoder"])


def test_hooks_on_parameters_run_once():
    torch.manual_seed(0)
    found = []
    eager = Net(_branches)
    for module in (ORTModule(copy.deepcopy(eager)), eager):
        calls = []
        weight = module.layers[1].linear.weight
        weight.register_hook(lambda g, calls=calls: calls.append(1) or g * 3)
        found.append([*step(module, rows(4)), *step(module, rows(4, 1)), torch.tensor(calls)])
    torch.testing.assert_close(*found)


class Moved(nn.Module):
    """Sets an attribute to a tensor that carries a gradient; the module around it uses it."""

    def __init__(self):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 4), None

    def forward(self, x):
        y = self.linear(x)
        self.loss = y.pow(2).mean() * (2 if y.sum().item() > 0 else 3)
        return y


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), Moved()
        self.double()

    def forward(self, x):
        y = self.part(self.first(x))
        return y.sum() + self.part.loss


def test_a_loss_in_an_attribute():
    torch.manual_seed(0)
    eager = WithLoss()
    ours = ORTModule(copy.deepcopy(eager))
    for i in range(4):
        found = []
        for module in (ours, eager):
            module.zero_grad()
            (module(rows(5, i)) + module.part.loss * 2).backward()
            found.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(*found)


def test_weight_norm_by_hooks():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(eager[2])
    ours = ORTModule(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(3):
            found = []
            for run in (ours, ours._ortmodule.in_pytorch()):
                ours.zero_grad()
                y = run(rows(4, i))
                y.pow(2).sum().backward()
                found.append([y.detach(), *(p.grad.clone() for p in ours.parameters())])
            torch.testing.assert_close(*found)
    assert explain(ours).python_ops == ["2"]


class DropsNothing(nn.Module):
    """Its dropout draws nothing, in PyTorch either; an island decides by what is drawn behind it."""

    def __init__(self, encoder):
        super().__init__()
        self.first, self.dropout, self.encoder = nn.Linear(4, 4), nn.Dropout(0.0), encoder

    def forward(self, x):
        return self.encoder(self.dropout(self.first(x)))


class Decides(nn.Module):
    def forward(self, x):
        return x.cos() if torch.rand(1) < 0.5 else x.sin()


def test_a_dropout_of_nothing_moves_no_generator():
    torch.manual_seed(0)
    theirs = DropsNothing(Decides())
    ours, x = ORTModule(copy.deepcopy(theirs)), torch.randn(3, 4)
    for seed in range(8):
        found = []
        for model in (ours, theirs):
            torch.manual_seed(seed)
            found.append((model(x), torch.rand(1)))
        torch.testing.assert_close(*found)
    assert explain(ours).engine_calls == 8 and explain(ours).python_ops == ["encoder"]
