"""ORTMODULE_VERIFY finds nothing where nothing is wrong, names what is, and leaves no trace."""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from ortmodule import ORTModule, explain
from ortmodule.debug import bisect, verify
from ortmodule.debug.verify import Verifier
from tests.models import zoo
from tests.models.compare import loss_of
from tests.selection import each

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers


def verifier(model):
    return model._ortmodule.observers.one(Verifier)


@pytest.fixture(autouse=True)
def each_call(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "1")


def check(model, steps):
    """Nothing was found, and everything was compared."""
    assert explain(model).captured, explain(model).fallback
    found = verifier(model)
    assert not found.findings, [str(finding) for finding in found.findings]
    assert (found.compared, found.gradients) == (steps, steps)


# --- nothing is wrong -------------------------------------------------------------------------------------------------


def with_dropout(config):
    """Sets every rate but those that leave out whole layers."""
    for name, setting in list(vars(config).items()):
        if isinstance(setting, transformers.PretrainedConfig):
            with_dropout(setting)
        elif isinstance(setting, float) and "drop" in name and "layer" not in name:
            setattr(config, name, 0.1)
    return config


SHORT = ("gpt2", "bert", "t5", "resnet")
NAMES = [name for name in zoo.ARCHITECTURES if name not in zoo.HARD]


@pytest.mark.parametrize("rate", [0.0, 0.1])
@each("name", NAMES, SHORT)
def test_the_model_suite(name, rate, monkeypatch):
    if rate:
        monkeypatch.setattr(zoo, "without_dropout", with_dropout)
    torch.manual_seed(0)
    architecture = zoo.ARCHITECTURES[name]
    model = ORTModule(architecture.build().train())
    for size in (0, 1):
        loss_of(model(**architecture.batch(model, size, torch.Generator().manual_seed(size)))).backward()
    if explain(model).captured or name != "m2m-100":  # which leaves out layers by a rate that is not its own
        check(model, 2)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_the_reference_agrees(name, monkeypatch):
    """Wherever a graph is cut, neither part is wrong: so no operator is blamed that is right."""
    monkeypatch.setattr(zoo, "without_dropout", with_dropout)
    cases = []
    monkeypatch.setattr(bisect, "Case", lambda *args, made=bisect.Case: cases.append(made(*args)) or cases[-1])
    torch.manual_seed(0)
    architecture = zoo.ARCHITECTURES[name]
    model = ORTModule(architecture.build().train())
    loss_of(model(**architecture.batch(model, 0, torch.Generator().manual_seed(0)))).backward()
    cuts = bisect._Cuts(cases[-1])
    assert not cuts.unknown
    loss = cuts.values[cuts.outputs[0]]
    assert loss.dim() == 0
    for at in [*cuts.steps[:: len(cuts.steps) // 6], len(cuts.nodes) - 1]:
        assert not cuts.first_is_wrong(at + 1), cuts.nodes[at].name
        assert not cuts.second_is_wrong(at, {0: torch.ones_like(loss)}), cuts.nodes[at].name


class Draws(nn.Module):
    """Every kind of random operator, each of which the result depends on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        y = F.dropout(y, 0.3) + torch.randn_like(y) * torch.rand_like(y)
        y = y * torch.bernoulli(y.sigmoid().detach()) + torch.randn(6) + torch.rand(y.shape[0], 1)
        return F.dropout1d(y[:, :, None], 0.4).squeeze(-1) + F.dropout(y.detach(), 0.5)


def test_all_random_operators():
    model = ORTModule(Draws())
    for _ in range(3):
        model(torch.randn(5, 6)).square().sum().backward()
    check(model, 3)


class Sign(torch.autograd.Function):
    """Draws as it runs."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = torch.rand_like(x) - 0.3
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask


class Partly(nn.Module):
    """The engine draws some, PyTorch others, in turns."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.opaque = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
        self.opaque[1].register_forward_hook(lambda module, args, result: None)

    def forward(self, x):
        y = F.dropout(self.first(x), 0.3)
        y = F.dropout(self.opaque(Sign.apply(y)), 0.2)
        return self.last(Sign.apply(y) * torch.rand_like(y))


def test_drawn_by_both():
    model = ORTModule(Partly())
    for n in (5, 4, 5):
        model(torch.randn(n, 6)).square().sum().backward()
    check(model, 3)
    assert explain(model).python_ops


class Convolved(nn.Module):
    """As a network over a graph: PyTorch has the operators behind a sparse matrix, and one of them draws by another
    name than its own."""

    def __init__(self, rates, width=5):
        super().__init__()
        self.rates = rates
        self.first, self.last = nn.Parameter(torch.randn(6, width)), nn.Parameter(torch.randn(width, 6))

    def forward(self, x, edges):
        y = torch.mm(F.dropout(x, self.rates[0]), self.first)
        y = F.dropout(torch.spmm(edges, y).relu(), self.rates[1])
        return F.dropout(torch.spmm(edges, torch.mm(y, self.last)), self.rates[2])


@pytest.mark.parametrize("rates", [(0.0, 0.5, 0.0), (0.3, 0.5, 0.0), (0.0, 0.5, 0.2), (0.3, 0.5, 0.2), (0.3, 0.5, 0.3)])
def test_a_composition_that_pytorch_runs(rates):
    torch.manual_seed(0)
    model = ORTModule(Convolved(rates))
    for _ in range(3):
        model(torch.randn(7, 6), torch.eye(7).to_sparse()).square().sum().backward()
    check(model, 3)
    assert "aten::dropout" in explain(model).aten_ops


def test_a_composition_that_draws_as_many_numbers_as_the_engine():
    model = ORTModule(Convolved((0.3, 0.5, 0.0), 6))
    with pytest.warns(UserWarning, match="both the engine and PyTorch draw with bernoulli_.float"):
        model(torch.randn(7, 6), torch.eye(7).to_sparse()).sum().backward()
    assert (verifier(model).compared, verifier(model).findings) == (0, [])


class Busy(nn.Module):
    """Statistics, a counter, an input that is changed, dropout."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x, seen):
        self.step += 1
        seen += x.detach().mean()
        return F.dropout(self.norm(self.linear(x)), 0.2) * self.step


def train(verify, monkeypatch, hooks=None):
    monkeypatch.setenv("ORTMODULE_VERIFY", verify)
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model = ORTModule(Busy())
    if hooks is not None:
        model.linear.weight.register_hook(lambda grad: hooks.append(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen, results = torch.zeros(4), []
    for _ in range(4):
        x = torch.randn(6, 4, requires_grad=True)
        loss = model(x, seen).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach(), x.grad, seen.clone()]
    results += [*model.state_dict().values(), torch.get_rng_state()]
    return model, results, random.random(), numpy.random.rand()


def test_it_leaves_no_trace(monkeypatch):
    hooks = []
    model, *found = train("1", monkeypatch, hooks)
    _, *expected = train("0", monkeypatch)
    check(model, 4)
    assert len(hooks) == 4, "a hook on a parameter was called by the comparison"
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert found[1:] == expected[1:]


def test_every_nth_call(monkeypatch):
    monkeypatch.setenv("ORTMODULE_VERIFY", "3")
    model = ORTModule(nn.Linear(3, 3))
    for _ in range(7):
        model(torch.ones(2, 3)).sum().backward()
    assert (verifier(model).calls, verifier(model).compared, verifier(model).gradients) == (7, 2, 2)


def test_inference_and_a_second_backward():
    model = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    with torch.no_grad():
        model(torch.ones(2, 3))
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert (verifier(model).compared, verifier(model).gradients) == (2, 2)
    assert not verifier(model).findings


def test_autocast():
    model = ORTModule(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2)))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
    check(model, 2)


class Remembers(nn.Module):
    """It goes on with what earlier calls have left in a dictionary and a list, and leaves something else there."""

    def __init__(self):
        super().__init__()
        self.layer, self.memo, self.maps = nn.Linear(8, 8), {"h": torch.zeros(8)}, [torch.zeros(8)]

    def forward(self, x):
        h = self.layer(x)
        y = h + self.memo["h"].mean() + self.maps[0].mean()
        self.memo["h"] = h.detach()
        self.maps[:] = [h.detach() * 2]
        return y


def test_what_earlier_calls_left():
    torch.manual_seed(0)
    model = ORTModule(Remembers())
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    assert verifier(model).findings == []


class HandsOn(nn.Module):
    """Returns what it is given, too."""

    def __init__(self, results=1):
        super().__init__()
        self.linear, self.results = nn.Linear(3, 3), results

    def forward(self, x):
        y = self.linear(x)
        return (*[(y * i).tanh() for i in range(1, self.results + 1)], x)


@pytest.mark.parametrize("results", [1, 2])
def test_what_another_model_has_made(results):
    """Its gradients are its own, also where it has as many results."""
    first, second = ORTModule(HandsOn(2)), ORTModule(HandsOn(results))
    for _ in range(3):
        given, other, _ = first(torch.randn(4, 3))
        sum(t.sum() for t in (*second(given), other)).backward()
    for model in (first, second):
        check(model, 3)


def test_what_the_call_before_has_made():
    model, kept = ORTModule(HandsOn()), torch.zeros(4, 3, requires_grad=True)
    for _ in range(4):
        made, again = model(kept)
        (made.sum() + again.sum()).backward(retain_graph=True)
        kept = made
    assert not verifier(model).findings
    assert verifier(model).gradients == 1 + 2 + 3 + 4  # of each forward that a backward goes through


class Tiny(nn.Module):
    """The gradient of the first layer is tiny beside that of the second."""

    def __init__(self, share):
        super().__init__()
        self.first, self.second, self.share = nn.Linear(8, 8), nn.Linear(8, 8), share

    def forward(self, x):
        return self.second(x) + self.share * self.first(x)


@pytest.mark.parametrize(
    "share, factor", [(1e-6, 1.0), (1e-3, 1 + 4e-3), (1e-4, 1.02), (1e-4, 0.0), (1e-4, -1.0)]
)  # fmt: skip
def test_a_gradient_that_is_small_beside_all(share, factor, monkeypatch):
    """Wrong by more than roundings move all gradients, however small it is."""
    before = Verifier._backward

    def spoiled(self, graph, eager, beside, case, got, given):
        names = [graph.session.inputs[i] for i in graph.leaves]
        got = [g * factor if "first.weight" in name else g for name, g in zip(names, got, strict=True)]
        return before(self, graph, eager, beside, case, got, given)

    monkeypatch.setattr(Verifier, "_backward", spoiled)
    monkeypatch.setattr(bisect, "backward", lambda case, grads: "not looked for")
    torch.manual_seed(0)
    model = ORTModule(Tiny(share))
    model(torch.randn(64, 8)).square().mean().backward()
    found = verifier(model).findings
    assert len(found) == (factor != 1) and all("first.weight" in finding.what for finding in found)


class Open(nn.Module):
    """Whether one ReLU passes is open: its operand is one rounding away from 0."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.x = nn.Linear(64, 16, bias=False), nn.Linear(16, 4), torch.randn(4, 64)
        self.shift = nn.Parameter(0.1 * torch.randn(16))
        self.shift_by(torch.inf)

    def shift_by(self, to):
        with torch.no_grad():
            near = -self.first(self.x)[0, 0]
            self.shift[0] = torch.nextafter(near, torch.full_like(near, to))

    def forward(self, x):
        return self.last(F.relu(self.first(x) + self.shift))


def found_with(gradients, model, *args):
    """What a verifier says if the engine's gradients are ``gradients``, by name."""
    before = Verifier._backward

    def given_these(self, graph, eager, beside, case, got, given):
        got = [gradients[graph.session.inputs[i].partition("/")[2]] for i in graph.leaves]
        return before(self, graph, eager, beside, case, got, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "_backward", given_these)
        patch.setattr(bisect, "backward", lambda case, given: "not looked for")
        ours = ORTModule(model)
        ours(*args).square().sum().backward()
    assert explain(ours).captured and verifier(ours).gradients == 1
    return verifier(ours).findings


def on_the_other_side(model, change):
    """What is said if that ReLU does not pass in the engine; ``change`` is made of the first gradient."""
    other = copy.deepcopy(model)
    other.shift_by(-torch.inf)
    other(model.x).square().sum().backward()
    gradients = {name: p.grad for name, p in other.named_parameters()}
    gradients["first.weight"] = change(gradients["first.weight"])
    return found_with(gradients, model, model.x)


def without_a_row(gradient):
    return gradient * (torch.arange(16) != 3)[:, None]


@pytest.mark.parametrize("seed", range(6))
def test_a_decision_that_is_open(seed):
    """It may fall to either side, as the first run on other roundings need not show."""
    assert not on_the_other_side(Open(seed), lambda gradient: gradient)
    for wrong in (torch.zeros_like, torch.neg, lambda g: 2 * g, without_a_row):
        (finding,) = on_the_other_side(Open(seed), wrong)
        assert "first.weight" in finding.what


def test_one_run_does_not_show_it(monkeypatch):
    monkeypatch.setattr(verify, "WAYS", verify.WAYS[:1])
    assert any(on_the_other_side(Open(seed), lambda gradient: gradient) for seed in range(6))


class Long(nn.Module):
    """PyTorch adds up the gradient one element after the other, and loses some of each."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.ones(2, 1), freeze=False)

    def forward(self, index):
        return self.table(index)


@pytest.mark.parametrize("factor, wrong", [(1.0, False), (1.1, True), (-1.0, True), (0.0, True)])
def test_what_pytorch_loses_itself(factor, wrong):
    model, index = Long(), torch.zeros(1 << 17, dtype=torch.int64)
    with torch.no_grad():
        model.table.weight.fill_(0.05)
    exact = torch.tensor([[2.0], [0]]) * len(index) * model.table.weight.double()
    assert bool(found_with({"table.weight": (factor * exact).float()}, model, index)) == wrong
    model.zero_grad()
    model(index).square().sum().backward()
    assert (model.table.weight.grad - exact).abs().max() > 1e-3 * exact.max()


# --- something is wrong -----------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.batch = nn.BatchNorm1d(8)

    def forward(self, x):
        y = F.dropout(self.norm(self.batch(torch.tanh(self.first(x)))), 0.1)
        return F.softmax(self.last(y).erf(), -1).cumsum(0)


#: The operator whose kernel is wrong -> (what differs, the type of the node, a part of its name).
BROKEN = {
    "Tanh": ("result", "Tanh", "Tanh"),
    "LayerNormalization": ("result", "LayerNormalization", "norm"),
    "DropoutTrain": ("result", "Dropout", "Dropout"),
    "Erf": ("result", "Erf", "Erf"),
    "Softmax": ("result", "Softmax", "Softmax"),
    "BatchNormUpdate": ("result", "BatchNormalization", "batch"),
    "CumSum": ("result", "CumSum", "CumSum"),
    "TanhGrad": ("gradient", "Tanh", "Tanh"),
    "LayerNormGrad": ("gradient", "LayerNormalization", "norm"),
    "ErfGrad": ("gradient", "Erf", "Erf"),
    "SoftmaxGrad": ("gradient", "Softmax", "Softmax"),
}


def one_step(model, x):
    torch.manual_seed(3)
    (model(x) * torch.arange(8.0)).sum().backward()


def find(operators):
    """In a process of its own, with the broken extension in place: what is said about each operator."""
    torch.manual_seed(0)
    eager, x = Small(), torch.randn(5, 8)
    said = {}
    for operator in ["", *operators]:
        model = ORTModule(copy.deepcopy(eager))
        os.environ["ORTMODULE_BROKEN"] = ""
        one_step(model, x)  # captured, checked and right
        os.environ["ORTMODULE_BROKEN"] = operator
        one_step(model, x)
        said[operator] = [[finding.what, finding.operator] for finding in verifier(model).findings]
    return said


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    if os.environ.get("ORTMODULE_BUILD"):
        pytest.skip("the broken build is made from the tree")
    library = tmp_path_factory.mktemp("broken") / "_core.abi3.so"
    build = [sys.executable, "setup.py", "-q", "build_broken", f"--target={library}"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    script = """if True:
        import importlib.util, json, sys, torch
        spec = importlib.util.spec_from_file_location("ortmodule._core", sys.argv[1])
        sys.modules["ortmodule._core"] = core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        from tests.debug.test_verify import find
        print(json.dumps(find(sys.argv[2:])))
    """
    run = subprocess.run(
        [sys.executable, "-c", script, str(library), *BROKEN],
        cwd=ROOT, env={**os.environ, "ORTMODULE_VERIFY": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.full  # it compiles the engine once more
def test_a_build_that_is_not_broken(findings):
    assert findings[""] == []


@pytest.mark.full
@pytest.mark.parametrize("operator", BROKEN)
def test_a_broken_kernel_is_named(operator, findings):
    what, kind, name = BROKEN[operator]
    assert findings[operator], "it was not found"
    said = findings[operator][0][1]
    assert said.startswith(f"the first operator whose {what} differs is {kind} ") and name in said.split()[-1], said


def test_a_batch_of_gradients():
    """`is_grads_batched`, as in vectorized Jacobians: PyTorch's autograd computes them."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    ours, x = ORTModule(copy.deepcopy(eager)), torch.ones(2, 3)
    found, expected = (torch.autograd.functional.jacobian(m, x, vectorize=True) for m in (ours, eager))
    torch.testing.assert_close(found, expected)
    assert explain(ours).captured and not verifier(ours).findings
