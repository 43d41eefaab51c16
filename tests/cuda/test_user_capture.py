"""A CUDA graph that the caller captures around a module: the engine's kernels become part of it, and nothing waits."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core
from tests.cuda.test_emulated import driver, session  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import INPUTS, ROWS, Around, Cached, Step, same
from tests.cuda.test_torch_attention import CUDNN, EFFICIENT, FLASH, fake  # noqa: F401  (a fixture)
from tests.passes.session import Function, export

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("error:.*PyTorch runs:UserWarning"),
]


class Capture:
    """``with capture:`` the default stream is captured; ``replay()`` runs what it was given, as often as one likes."""

    def __init__(self, driver):  # noqa: F811
        self.driver, self.replay = driver, driver.fake_user_replay

    def __enter__(self):
        self.waits, self.given = self.driver.fake_waits(), self.driver.fake_given()
        self.driver.fake_user_capture(1)

    def __exit__(self, *failed):
        self.driver.fake_user_capture(0)
        assert self.driver.fake_waits() == self.waits, "something has waited"
        assert self.driver.fake_given() == self.given, "something has run"


@pytest.fixture
def capture(driver):  # noqa: F811
    made = Capture(driver)
    yield made
    driver.fake_user_capture(1), driver.fake_user_capture(0)


class Drawn(nn.Module):
    """Layers with a dropout."""

    def __init__(self, p):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(p), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x)))).softmax(-1)


def trained(p=0.0, needs_grad=False):
    """A module of the engine's that has made steps on x, also as graphs of its own, and one of PyTorch's like it."""
    torch.manual_seed(0)
    model = Drawn(p)
    expected, wrapped, x = copy.deepcopy(model), ORTModule(model), torch.randn(5, 6, requires_grad=needs_grad)
    for _ in range(4):
        wrapped(x).square().sum().backward()
    return wrapped, expected, x


def test_a_forward_is_captured(driver, capture, monkeypatch):  # noqa: F811
    """Replays compute what a call would, from what lies in the inputs and parameters then."""
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    model, expected, x = trained()
    assert driver.fake_graphs() > 0
    with torch.no_grad():
        model(x)
        started = driver.fake_graphs()
        with capture:
            y = model(x)
        assert driver.fake_graphs() == started, "the engine started a graph of its own in the caller's"
        for _ in range(3):
            x.normal_()
            capture.replay()
            torch.testing.assert_close(y, expected(x))
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            parameter.mul_(2), other.mul_(2)
        capture.replay()
        torch.testing.assert_close(y, expected(x))


def test_a_step_is_captured(driver, capture):  # noqa: F811
    """Forward and backward; what runs beside the graph stays right, and goes on as graphs of the engine's own."""
    step = Step()
    step.run(7), step.run(7)
    before = step.plan.graphs
    with capture:
        step.plan.forward(step.arena, [step.x, step.w], [step.y], [], 7, None, 0, False, True)
        step.plan.backward(
            step.arena, [step.x, step.w], [step.y], [step.dy], step.grads, 7, None, 0, False, True
        )  # fmt: skip
    assert step.plan.graphs == before
    for _ in range(2):
        step.x.normal_(), step.dy.normal_()
        wanted = step.run(7)
        step.y.zero_(), [grad.zero_() for grad in step.grads]
        capture.replay()
        assert same([step.y, *step.grads], wanted)
    assert step.plan.graphs[2] > before[2]


def test_masks_differ_from_replay_to_replay(capture, monkeypatch):
    """The seed is torch's to draw, in the graph; forward and backward read it from one place."""
    made = []
    random_ = torch.Tensor.random_

    def draw(tensor):  # torch's kernel is part of the graph; here it runs at once, and again by hand
        made.append(tensor)
        return random_(tensor)

    model, _, x = trained(0.5, needs_grad=True)
    monkeypatch.setattr(torch.Tensor, "random_", draw)
    with capture:
        y = model(x)
    seeds = [tensor for tensor in made if tensor.numel() == 1]
    found = []
    for seed in (11, 12, 11):
        seeds[-1].fill_(seed)
        capture.replay()
        found.append(y.detach().clone())
    assert not torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_backward_has_the_masks_of_its_forward(capture):
    s = session(ROWS, INPUTS, ("y", "float32", 2))
    x, w, dy = torch.randn(9, 17), torch.randn(17, 5), torch.randn(9, 5)
    needs = [True, True]
    s.run([x, w], needs, [True], seed=1)
    with capture:
        run = s.run([x, w], needs, [True], seed=1)
        y, seed, arena = run.outputs[0], run.seed_there, run._arena
        grads = run.backward([dy])
    for drawn in (5, 6):
        seed.fill_(drawn)
        capture.replay()
        wanted = s.run([x, w], needs, [True], seed=drawn)
        assert torch.equal(y, wanted.outputs[0])
        assert same(grads, wanted.backward([dy]))
    assert arena is not None


def test_gradients_that_pytorch_would_compute_are_refused(capture):
    model, _, x = trained(0.5, needs_grad=True)
    with capture:
        y = model(x)
    with pytest.raises(RuntimeError, match="only that knows which random numbers it drew"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_what_was_never_run_is_refused(driver, capture):  # noqa: F811
    """No graph of the module, or no plan for the shapes: a sentence; afterwards they are made as ever."""
    sentence = "while a CUDA graph is captured no graph or plan can be made.*run the same step before the capture"
    torch.manual_seed(0)
    new, x = Drawn(0.0), torch.randn(5, 6)
    expected, new = copy.deepcopy(new), ORTModule(new)
    with pytest.raises(RuntimeError, match=sentence), capture:
        new(x)
    torch.testing.assert_close(new(x), expected(x))
    known, expected, _ = trained()
    other = torch.randn(7, 6)
    with pytest.raises(RuntimeError, match=sentence), capture:
        known(other)
    torch.testing.assert_close(known(other), expected(other))


def test_sizes_that_data_decides_are_refused(capture):
    rows = [("Greater", "x w", "m", {}), ("NonZero", "m", "y", {})]
    s = session(rows, {"x": ("float32", 1), "w": ("float32", 1)}, ("y", "int64", 2))
    tensors = [torch.randn(9), torch.zeros(9)]
    found = s.run(tensors, [False] * 2).outputs[0]
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured .*cannot tell the host a size"), capture:
        s.run(tensors, [False] * 2)
    assert torch.equal(s.run(tensors, [False] * 2).outputs[0], found)


def test_constants_outlive_their_plan(capture):
    """The caller's graph reads them when nothing else knows of them any more."""
    rows = [("Constant", "", "c", {"value_floats": [1.0, 2.0, 3.0]}), ("Mul", "x c", "a", {}), ("Tanh", "a", "y", {})]
    s = session(rows, {"x": ("float32", 1)}, ("y", "float32", 1))
    x = torch.randn(3)
    s.run([x], [False])
    with capture:
        y = s.run([x], [False]).outputs[0]
    del s
    rubbish = [torch.full((64,), float("nan")) for _ in range(200)]
    x.normal_()
    capture.replay()
    torch.testing.assert_close(y, torch.tanh(x * torch.tensor([1.0, 2.0, 3.0])))
    assert len(rubbish) == 200


@pytest.mark.filterwarnings("ignore")
def test_generators_are_not_read(capture, monkeypatch):
    """Those of a GPU cannot be while they belong to the graph; nodes that PyTorch runs are captured all the same."""
    model, x = ORTModule(Around()), torch.randn(7, 6, requires_grad=True)
    model(x).sum().backward()

    def generators():
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    with monkeypatch.context() as patched, capture:
        patched.setattr("ortmodule.core.devices.generators", generators)
        y = model(x)
    with pytest.raises(RuntimeError, match="only that knows which random numbers it drew"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def attending(q, k, v, bias=None, ratio=0.0):
    scores = q @ k.transpose(-1, -2) / 8**0.5
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return (nn.functional.dropout(weights, ratio) if ratio else weights) @ v


#: Attention by torch's kernels: (type, whether there is a bias, dropout, the kernel).
ATTENTION = {
    "cuDNN's": (torch.bfloat16, False, 0.0, CUDNN),
    "efficient": (torch.float32, False, 0.0, EFFICIENT),
    "flash, dropout": (torch.bfloat16, False, 0.25, FLASH),
    "efficient, dropout": (torch.float32, False, 0.25, EFFICIENT),
    "a bias, dropout": (torch.bfloat16, True, 0.25, EFFICIENT),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_by_torch_is_captured(driver, fake, capture, case):  # noqa: F811
    """Replays attend to what lies in the operands then. Torch's kernels draw anew in each, on the GPU, and backward
    drops what forward dropped: results are linear in v. Outside of the capture they draw on the CPU as before."""
    dtype, has_bias, ratio, kernel = ATTENTION[case]
    torch.manual_seed(0)
    tensors = [torch.randn(4, 16, 256, 8).to(dtype) for _ in range(3)]
    tensors += [torch.randn(1, 16, 256, 256).to(dtype)] * has_bias
    made = export(Function(lambda *of: attending(*of, ratio=ratio)), tensors)
    needs, dy = [True] * len(tensors), torch.randn(4, 16, 256, 8).to(dtype)
    made.run(tensors, needs, [True], seed=1).backward([dy])
    held, before = driver.fake_held(), fake.fake_attentions_by(kernel)
    with capture:
        run = made.run(tensors, needs, [True], seed=1)
        y, arena = run.outputs[0], run._arena
        grads = run.backward([dy])
    assert arena is not None
    assert fake.fake_attentions_by(kernel) == before + 2 and driver.fake_held() == held
    found = []
    for _ in range(2):
        tensors[2].normal_(), dy.normal_()
        capture.replay()
        found.append((y.clone(), tensors[2].clone()))
        pairs = [(grads[2], tensors[2]), (y, dy)]
        sums = [(a.double() * b.double()).sum() for a, b in pairs]
        assert abs(sums[0] - sums[1]) <= 2e-2 * (y.double() * dy.double()).abs().sum()
        if not ratio:
            exact = attending(*(x.double() for x in tensors))
            assert (y.double() - exact).abs().max() <= 2e-2
    capture.replay()
    assert torch.equal(y, found[1][0]) == (not ratio), "the same elements are dropped in two replays"
    waits = driver.fake_waits()
    run = made.run(tensors, needs, [True], seed=1)
    dv = run.backward([dy])[2]
    sums = [(a.double() * b.double()).sum() for a, b in ((dv, tensors[2]), (run.outputs[0], dy))]
    assert abs(sums[0] - sums[1]) <= 2e-2 * (run.outputs[0].double() * dy.double()).abs().sum()
    assert driver.fake_waits() == waits


def test_backward_outside_of_the_capture_drops_what_a_replay_dropped(driver, fake, capture):  # noqa: F811
    """The numbers are on the GPU alone: the host waits for them, and takes none that it knows of an earlier run."""
    torch.manual_seed(0)
    tensors = [torch.randn(4, 16, 256, 8) for _ in range(3)]
    made = export(Function(lambda *of: attending(*of, ratio=0.25)), tensors)
    dy = torch.randn(4, 16, 256, 8)
    made.run(tensors, [True] * 3, [True], seed=1).backward([dy])
    with capture:
        run = made.run(tensors, [True] * 3, [True], seed=1)
    capture.replay()
    dv = run.backward([dy])[2]
    sums = [(a.double() * b.double()).sum() for a, b in ((dv, tensors[2]), (run.outputs[0], dy))]
    assert abs(sums[0] - sums[1]) <= 2e-2 * (run.outputs[0].double() * dy.double()).abs().sum()
