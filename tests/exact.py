"""A training step beside float64, dropout on: PyTorch gets the masks that the engine drew.

16-bit results are right when they are about as near to the exact ones as what PyTorch computes in the same types.
"""

import contextlib
import copy

import torch

from ortmodule import ORTModule, devices, explain
from ortmodule.draws import Draws, Redraw
from ortmodule.observe import Observers
from ortmodule.regions import Passed
from ortmodule.verify import Before
from tests.models.compare import InDouble, step, to

TIMES = 2  # PyTorch's own error: what the engine's may be
#: Of a gradient: what an error may be where PyTorch's is smaller, by chance. About one rounding.
LEAST = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
#: Of all gradients: a parameter whose exact gradient is smaller has none by mathematics (a bias of attention's keys);
#: what is there is rounding, which may differ more.
NOTHING = 1e-9
TIMES_NOTHING = 8


class Recorder:
    """Keeps what the engine drew in its last forward."""

    def __init__(self):
        self.draws = []

    def before_forward(self, graph, call):
        before = Before(call.inputs, call.tree)

        def after_forward(result):
            assert graph.session.known is None, "nodes that PyTorch runs draw numbers of their own"
            draws = Draws(graph.capture.model)
            self.draws = draws.of(before.feeds(graph.session.inputs, call.tree), before.seed())

        return after_forward


def recorded(module):
    """A copy of ``module`` in an ORTModule, and the recorder of what it draws."""
    ours, recorder = ORTModule(copy.deepcopy(module)), Recorder()
    ours._ortmodule.observers = Observers([recorder])
    return ours, recorder


@contextlib.contextmanager
def drawn(draws):
    """Inside, dropout in PyTorch drops what the engine dropped."""
    generator = devices.generators()
    try:
        with Redraw(draws, Passed(None, [])):
            yield
    finally:
        devices.set_generators(generator)


def assert_as_near(found, theirs, exact, dtype, what=""):
    """Each tensor by name: no farther from the exact one than TIMES what PyTorch's is, or one rounding; in the
    Euclidean norm. Zeros are never as near, where the exact one is not nothing."""
    assert found.keys() == theirs.keys() == exact.keys()
    everything = torch.stack([g.double().norm() for g in exact.values()]).norm()
    wrong = []
    for name, expected in exact.items():
        size, of_theirs = expected.norm(), (theirs[name].double() - expected).norm()
        if size <= NOTHING * everything:
            allowed = TIMES_NOTHING * of_theirs + LEAST[dtype] * NOTHING * everything
        else:
            allowed = TIMES * of_theirs + LEAST[dtype] * size
            assert allowed < size, f"{what} {name}: PyTorch's own is off by {of_theirs:.3g} of {size:.3g}"
        off = (found[name].double() - expected).norm()
        if not off <= allowed:
            wrong.append(f"{name} is off by {off:.3g}, PyTorch's by {of_theirs:.3g}, of {size:.3g}")
    assert not wrong, f"{what}: " + "; ".join(wrong)


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
