"""Compares a training step with float64, dropout on: PyTorch gets the masks that the engine drew.

16-bit results are right when they are about as near to the exact ones as what PyTorch computes in the same types.
"""

import contextlib
import copy

import torch

from ortmodule import ORTModule, explain
from ortmodule.core import devices
from ortmodule.debug.observers import Observers
from ortmodule.debug.verify import Before
from ortmodule.host.passed_calls import Passed
from ortmodule.runtime.executable import seed_of
from ortmodule.runtime.rng_replay import ReplayMode, RngReplay
from tests.models.compare import InDouble, step, to

TIMES = 2  # PyTorch's own error: what the engine's may be
#: Of a gradient: what an error may be where PyTorch's is smaller, by chance. About one rounding.
LEAST = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
#: Of all gradients: a parameter whose exact gradient is smaller has none by mathematics (a bias of attention's keys);
#: what is there is rounding, which may differ more.
NOTHING = 1e-9
TIMES_NOTHING = 8


class Exactly(InDouble):
    """Inside, what asks for a narrower float gets float64: casts of a module that spells out autocast, too."""

    NARROWER = (torch.float32, torch.bfloat16, torch.float16)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(torch.float64 if isinstance(x, torch.dtype) and x in self.NARROWER else x for x in args)
        return super().__torch_function__(func, types, args, kwargs)


class Recorder:
    """Keeps what the engine drew in its last forward."""

    def __init__(self):
        self.draws = []

    def before_forward(self, graph, call):
        before = Before(call.inputs, call.tree)

        def after_forward(result):
            assert graph.session.known is None, "nodes that PyTorch runs draw numbers of their own"
            draws = RngReplay(graph.capture.model)
            self.draws = draws.of(before.feeds(graph.session.inputs, call.tree), seed_of(before.generator))

        return after_forward


def record(wrapped):
    """What an ORTModule draws from now on."""
    recorder = Recorder()
    wrapped._ortmodule.observers = Observers([recorder])
    return recorder


def recorded(module):
    """A copy of ``module`` in an ORTModule, and the recorder of what it draws."""
    ours = ORTModule(copy.deepcopy(module))
    return ours, record(ours)


@contextlib.contextmanager
def drawn(draws):
    """Inside, dropout in PyTorch drops what the engine dropped."""
    generator = devices.generators()
    try:
        with ReplayMode(draws, Passed(None, []), set()):
            yield
    finally:
        devices.set_generators(generator)


def assert_as_near(found, theirs, exact, dtype, what="", times=TIMES, measured=True):
    """Each tensor by name: no farther from the exact one than `times` what PyTorch's is, or one rounding; in the
    Euclidean norm. Zeros are never as near, where the exact one is not nothing: where PyTorch's own would not do better
    it is an error of the case, or, if not `measured`, not compared."""
    assert found.keys() == theirs.keys() == exact.keys()
    everything = torch.stack([g.double().norm() for g in exact.values()]).norm()
    wrong = []
    for name, expected in exact.items():
        size, of_theirs = expected.norm(), (theirs[name].double() - expected).norm()
        if size <= NOTHING * everything:
            allowed = TIMES_NOTHING * of_theirs + LEAST[dtype] * NOTHING * everything
        else:
            allowed = times * of_theirs + LEAST[dtype] * size
            if allowed >= size and not measured:
                continue
            assert allowed < size, f"{what} {name}: PyTorch's own is off by {of_theirs:.3g} of {size:.3g}"
        off = (found[name].double() - expected).norm()
        if not off <= allowed:
            wrong.append(f"{name} is off by {off:.3g}, PyTorch's by {of_theirs:.3g}, of {size:.3g}")
    assert not wrong, f"{what}: " + "; ".join(wrong)


def check_run(module, model, feeds, results, dy, dtype, seed=0, narrowest=None, **options):
    """A run of an exported ``model`` (an onnx.ModelProto) with this ``seed``, in ``dtype``: ``results`` are its output
    and the gradients of ``feeds``, tensors by the names of its inputs: x0, x1, ... those of the operands, in order.
    ``narrowest``: the type in which the module rounds, if it is another."""
    draws, sides = RngReplay(model).of(feeds, seed), [_named(feeds, results)]
    for kind, mode in ((dtype, contextlib.nullcontext()), (torch.float64, Exactly())):
        copied = copy.deepcopy(module).to(kind) if any(True for _ in module.parameters()) else module
        parameters = dict(copied.named_parameters())
        leaves = {name: x.detach().to(kind).requires_grad_() for name, x in feeds.items() if name not in parameters}
        for name in parameters.keys() & feeds.keys():
            parameters[name].data.copy_(feeds[name])
        leaves |= {name: parameters[name] for name in feeds if name in parameters}
        operands = [leaves[name] for name in sorted(leaves.keys() - parameters.keys())]
        with drawn(draws), mode:
            y = copied(*operands)
            wanted = list(leaves.values())
            grads = torch.autograd.grad(y, wanted, dy.to(y.dtype), materialize_grads=True, allow_unused=True)
        sides.append(_named(leaves, [y.detach(), *grads]))
    found, theirs, exact = sides
    if all(t.isfinite().all() for t in (*theirs.values(), *exact.values())):
        assert_as_near(found, theirs, exact, narrowest or dtype, **options)
    else:
        for name, t in found.items():
            assert torch.equal(t.isfinite(), theirs[name].isfinite()), f"{name} is not finite in the same places"


def _named(inputs, results):
    return dict(zip(["the result", *inputs], results, strict=True))


def gradients(grads):
    return {name: g for name, g in grads.items() if g is not None}


def check_step(module, batch, dtype=None, autocast=None, seed=0, wrapped=None):
    """Loss and every gradient of a step of ``module``, in ``dtype`` or under ``autocast``. Returns the ORTModule."""
    module = module if dtype is None else module.to(dtype)
    batch = batch if dtype is None else to(dtype, batch)
    ours, recorder = wrapped or recorded(module)
    casts = torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext()
    torch.manual_seed(seed)
    with casts:
        loss, grads = step(ours, batch)
    report = explain(ours)
    assert report.captured, report.fallback
    exact = copy.deepcopy(module).double()
    with drawn(recorder.draws), casts:
        their_loss, theirs = step(copy.deepcopy(module), batch)
    with drawn(recorder.draws), InDouble():
        exact_loss, wanted = step(exact, to(torch.float64, batch))
    sides = [gradients(g) | {"the loss": a} for g, a in ((grads, loss), (theirs, their_loss), (wanted, exact_loss))]
    assert_as_near(*sides, dtype or autocast or torch.float32)
    return ours, recorder
