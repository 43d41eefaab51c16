"""Runs one module, of any kind, through the engine and in PyTorch: what came out, and what ran it.

A :class:`Subject` builds a module and makes batches of two sizes. Loss, every gradient (of parameters and of inputs
that want one), buffers and everything that forward returns have to be PyTorch's. Where float32 does not agree,
float64 decides: a badly conditioned model magnifies rounding. Then both sides' float32 is compared with float64: the
engine's may be MAGNIFIED times as far off as PyTorch's own, from these parameters or from some a rounding beside.
"""

import copy
import os
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import numpy
import torch
from torch import nn

from ortmodule import DebugOptions, LogLevel, ORTModule, explain
from ortmodule.debug.verify import Verifier
from tests.models.compare import InDouble, Sides, to

#: Deviations that are allowed: of the loss from max(1, |loss|); of a gradient from |g| + SHARE * |all gradients|.
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.float64: (1e-10, 1e-8)}
SHARE = 1e-2
TIMES = 10  # times the tolerance of the loss: what the results may be apart
#: Times PyTorch's own distance from float64, of each gradient and of the loss: both sides round as often, in other
#: places, and which of them is luckier is chance. A ReLU whose operand is near 0 decides much at once, on either side:
#: so PyTorch runs BESIDE times more, on parameters of which half are larger by one bit.
MAGNIFIED = 4
BESIDE = 5
STEPS = ((0, 0), (1, 0), (0, 1))  # (size, seed) of the batches that are compared

RIGHT, DOUBLE, WRONG, UNBUILT = "right", "right in float64", "wrong", "not built"


@dataclass(frozen=True)
class Subject:
    """``build()``: a module ready to train. ``batch(module, size, generator)``: arguments of its forward, by name.
    ``anew``: the engine's is built, too, as a copy would have closures over parts of the original. ``double``: its
    forward makes float64 tensors, so float32 is not tried."""

    build: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int, torch.Generator], dict]
    group: str
    anew: bool = False
    double: bool = False

    def precision(self, dtype):
        """What it is tried in, for ``dtype``."""
        return torch.float64 if self.double else dtype

    def built(self):
        """A module, the same each time: some initialize theirs by NumPy, or by Python."""
        torch.manual_seed(0)
        numpy.random.seed(0)
        random.seed(0)
        return self.build()


@dataclass
class Outcome:
    """What became of a subject."""

    name: str
    group: str = ""
    tried: str = ""  # what was built, and what it was given
    state: str = RIGHT
    captured: bool = False
    reason: str = ""  # why PyTorch ran it, or what is wrong
    mode: str = "train"
    loss_off: float = 0.0
    grad_off: float = 0.0
    exports: int = 0
    nodes: int = 0
    outside: list[str] = field(default_factory=list)  # operators that PyTorch runs inside the graph
    seconds: float = 0.0


class Different(AssertionError):
    """Not what PyTorch gives; the sentence says what."""


def tensors_of(result):
    """Every tensor of a result, in order, with numbers as tensors."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (bool, int, float)):
        return [torch.tensor(result)]
    if isinstance(result, dict):
        result = result.values()
    elif not isinstance(result, (tuple, list)):
        result = vars(result).values() if hasattr(result, "__dict__") and not isinstance(result, type) else ()
    return [tensor for part in result for tensor in tensors_of(part)]


def loss_of(result):
    """The loss that a model computes, or else fixed weights on everything that carries a gradient."""
    loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss.reshape(())
    parts, generator = [], torch.Generator().manual_seed(7)
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weight = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            parts.append((tensor * weight).mean())
    if not parts:
        raise ValueError("nothing that forward returns carries a gradient")
    return sum(parts)


def step(module, batch):
    """(loss, gradients by name, results, buffers) of one forward and backward."""
    module.zero_grad(set_to_none=True)
    batch = {k: _fresh(v) for k, v in batch.items()}
    result = module(**batch)
    loss = loss_of(result)
    loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    grads |= {f"input {k}": v.grad for k, v in batch.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    return loss.detach(), grads, [t.detach() for t in tensors_of(result)], dict(module.named_buffers())


def _fresh(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def deviation(ours, eager):
    """(of the loss, the largest of a gradient). Raises Different for what no rounding explains."""
    (loss, grads, results, buffers), (eager_loss, eager_grads, eager_results, eager_buffers) = ours, eager
    if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in eager_results]:
        raise Different(f"returns {_kinds(results)}, not {_kinds(eager_results)}")
    if bool(loss.isfinite()) != bool(eager_loss.isfinite()):
        raise Different(f"loss {loss}, not {eager_loss}")
    if not eager_loss.isfinite():
        raise ValueError(f"PyTorch's loss is {eager_loss}")
    off = ((loss - eager_loss).abs() / eager_loss.abs().clamp(min=1)).item()
    norms = [g.detach().double().norm() for g in eager_grads.values() if g is not None and not g.is_sparse]
    everything = torch.stack(norms).norm() if norms else 0.0
    worst = 0.0
    for name, expected in eager_grads.items():
        found = grads[name]
        if (found is None) != (expected is None):
            raise Different(f"{name} has {'no' if found is None else 'a'} gradient")
        if expected is not None and expected.norm() + found.norm() != 0:  # (nor where it is not a number)
            apart = (found.double() - expected.double()).norm()
            share = (apart / (expected.double().norm() + SHARE * everything)).item()
            worst = max(worst, share if share == share else float("inf"))
    for tensor, expected in zip([*results, *buffers.values()], [*eager_results, *eager_buffers.values()], strict=True):
        if not tensor.is_floating_point() or not tensor.numel():
            if not torch.equal(tensor, expected):
                raise Different(f"returns other numbers ({_kinds([tensor])})")
        elif not torch.equal(tensor.isfinite(), expected.isfinite()):
            raise Different("is not finite in the same places")
        else:
            finite = expected.isfinite()
            tensor, expected = tensor[finite].double(), expected[finite].double()
            if tensor.numel():
                scale = expected.norm() + 1e-2 * expected.numel() ** 0.5
                off = max(off, ((tensor - expected).norm() / scale).item() / TIMES)
    return off, worst


def farther(ours, eager, exact):
    """What of a step is farther from the exact one than rounding explains, or an empty string: each gradient, and the
    loss, by MAGNIFIED times PyTorch's distance (``eager``: several runs), or the tolerance if that is more."""
    of_loss, of_gradients = TOLERANCE[torch.float32]
    off, *others = ((side[0].double() - exact[0]).abs().item() for side in (ours, *eager))
    if off > max(MAGNIFIED * max(others), of_loss * exact[0].abs().clamp(min=1).item()):
        return f"the loss is off by {off:.1e}, PyTorch's by {max(others):.1e}"
    known = {name: g for name, g in exact[1].items() if g is not None}
    everything = torch.stack([g.norm() for g in known.values()]).norm()
    for name, g in known.items():
        off, *others = ((side[1][name].double() - g).norm() for side in (ours, *eager))
        if off > max(MAGNIFIED * max(others), of_gradients * (g.norm() + SHARE * everything)):
            return f"the gradient of {name} is off by {off:.1e} of {g.norm():.1e}, PyTorch's by {max(others):.1e}"
    return ""


def beside(module, seed):
    """A copy of a module with half of its parameters larger by one bit."""
    moved, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in moved.parameters():
            up = torch.nextafter(p, torch.full_like(p, torch.inf))
            p.copy_(torch.where(torch.rand(p.shape, generator=generator) < 0.5, up, p))
    return moved


class OnSides(nn.Module):
    """A module whose ReLUs and max pools choose as those of another run did, which are ``given``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, given, **batch):
        with Sides(given):
            return self.module(**batch)


def check_magnified(subject, mode):
    """Raises Different where the engine's float32 is farther from float64 than PyTorch's is. Where the operand of a
    ReLU is nothing but rounding, its side is chance, in any run: then all are tried once more on float64's sides."""
    pair, exact = _Pair(subject, torch.float32, mode), _Pair(subject, torch.float64, mode)
    for size, seed in STEPS:
        eager, batch = copy.deepcopy(pair.eager), pair.batch(size, seed)
        with InDouble(), Sides() as sides:
            truth = _seeded(exact.eager, exact.batch(size, seed))
        text = _farther(pair.ours, pair.eager, batch, truth)
        if text and sides.seen:
            on_sides = OnSides(eager)
            batch["given"] = [tensor.to(pair.dtype) for tensor in sides.seen]
            text = _farther(quiet(copy.deepcopy(on_sides)), on_sides, batch, truth)
        if text:
            raise Different(text)


def _farther(ours, eager, batch, truth):
    """What of the engine's step is too far from the exact one, ``truth``, by PyTorch's on parameters beside, too."""
    modules = [eager, *(beside(eager, i) for i in range(BESIDE))]
    return farther(_seeded(ours, batch), [_seeded(module, batch) for module in modules], truth)


def _seeded(module, batch):
    """A step from the one seed. Gradients have the names of the subject's parameters."""
    torch.manual_seed(5)
    loss, grads, *others = step(module, batch)
    inner = "module." if isinstance(getattr(module, "_module", module), OnSides) else ""
    return loss, {name.removeprefix(inner): g for name, g in grads.items()}, *others


def _kinds(tensors):
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors[:8])


def quiet(module):
    """The module in the engine, which logs nothing."""
    return ORTModule(module, DebugOptions(log_level=LogLevel.FATAL))


class _Pair:
    """A subject's module in PyTorch and in the engine."""

    def __init__(self, subject, dtype, mode):
        dtype = subject.precision(dtype)
        self.subject, self.dtype = subject, dtype
        self.eager = subject.built().to(dtype).train(mode == "train")
        other = copy.deepcopy(self.eager)
        if subject.anew:
            other = subject.built().to(dtype).train(mode == "train")
        self.ours = quiet(other)

    def batch(self, size, seed):
        torch.manual_seed(1000 + seed)
        return to(self.dtype, self.subject.batch(self.eager, size, torch.Generator().manual_seed(seed)))

    def compare(self, outcome):
        """Deviations over all steps; what ran them goes into ``outcome``."""
        worst = 0.0, 0.0
        refused = []  # reasons by call
        for size, seed in STEPS:
            batch = self.batch(size, seed)
            torch.manual_seed(5)
            eager = step(self.eager, batch)
            torch.manual_seed(5)
            try:
                ours = step(self.ours, batch)
            finally:
                report = explain(self.ours)
                refused.append("" if report.captured else report.fallback or "not called")
                # A first call may settle what forward sets once.
                outcome.captured = not any(refused[1:] or refused)
                first = next((reason for reason in refused if reason), "")
                outcome.reason = f"only the first call: {first}" if outcome.captured and first else first
            worst = tuple(map(max, worst, deviation(ours, eager)))
        if outcome.captured:
            outcome.exports, outcome.nodes = report.exports, report.nodes_run
            outcome.outside = [*report.aten_ops, *report.python_ops]
        return worst


def check_draws(subject, outcome):
    """What draws in eval mode, too, is compared by ORTMODULE_VERIFY: PyTorch gets what the engine drew."""
    with mock.patch.dict(os.environ, ORTMODULE_VERIFY="1"):
        pair = _Pair(subject, torch.float32, "train")
        for size, seed in STEPS:  # its parts are wrapped now
            step(pair.ours, pair.batch(size, seed))
        for size, seed in STEPS[: explain(pair.ours).pytorch_calls]:  # calls that fill a cache are PyTorch's
            step(pair.ours, pair.batch(size, seed))
    report, owner = explain(pair.ours), pair.ours._ortmodule
    verifier = owner.observers.one(Verifier)
    parts = [part._ortmodule.observers.one(Verifier) for part in owner.parts.found(False).values()]
    outcome.captured, outcome.reason = report.captured, report.fallback or ""
    if not outcome.captured:
        return
    if findings := [finding for each in (verifier, *parts) for finding in each.findings]:
        raise Different(str(findings[0]))
    # Where submodules that are graphs of their own draw, each is compared by itself.
    by_parts = parts and all(each.compared == each.calls for each in parts)
    if verifier.compared != len(STEPS) and not by_parts:
        outcome.state, outcome.reason = (
            UNBUILT,
            "it draws numbers in eval mode, too, which cannot be drawn again",
        )
    outcome.loss_off = outcome.grad_off = float("nan")
    outcome.exports, outcome.nodes = report.exports, report.nodes_run
    outcome.outside = [*report.aten_ops, *report.python_ops]


def described(subject):
    """Class, size and arguments of a subject."""
    pair = _Pair(subject, torch.float32, "train")
    count = sum(p.numel() for p in pair.eager.parameters())
    given = (f"{k} {_kinds([v]) if isinstance(v, torch.Tensor) else v}" for k, v in pair.batch(0, 0).items())
    return f"{type(pair.eager).__name__} of {count:,} parameters; {', '.join(given)}"


def is_random(subject, mode):
    """Does PyTorch give other results with another seed? Rounding counts for nothing: an order may be drawn."""
    pair = _Pair(subject, torch.float32, mode)
    batch, losses = pair.batch(0, 0), []
    start = copy.deepcopy(pair.eager.state_dict())
    for seed in (1, 2):
        torch.manual_seed(seed)
        pair.eager.load_state_dict(start)
        losses.append(step(pair.eager, batch))
    pairs = [(losses[0][0], losses[1][0]), *zip(losses[0][2], losses[1][2], strict=True)]
    return not all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(a, b):
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)


def attempt(name, subject):
    """The outcome of one subject. Never raises."""
    outcome = Outcome(name, subject.group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcome.tried = described(subject)
            if is_random(subject, outcome.mode):
                outcome.mode = "eval" if not is_random(subject, "eval") else "verified"
        except Exception as error:
            outcome.state, outcome.reason = UNBUILT, _line(error)
            return outcome
        try:
            (check_draws if outcome.mode == "verified" else _judge)(subject, outcome)
        except Exception as error:
            outcome.state, outcome.reason = WRONG, _line(error)
    outcome.reason = general(outcome.reason)
    return outcome


def _judge(subject, outcome):
    wrong = ""
    try:
        outcome.loss_off, outcome.grad_off = _Pair(subject, torch.float32, outcome.mode).compare(outcome)
    except Different as error:
        wrong = str(error)
    if not wrong and _within(outcome, subject.precision(torch.float32)):
        return
    loss_off, grad_off = outcome.loss_off, outcome.grad_off
    try:
        if not wrong:
            check_magnified(subject, outcome.mode)
        with InDouble():
            wide = Outcome(outcome.name)
            wide.loss_off, wide.grad_off = _Pair(subject, torch.float64, outcome.mode).compare(wide)
    except Exception as error:
        outcome.state = WRONG
        outcome.reason = wrong or f"off by {loss_off:.1e}, {grad_off:.1e}; float64: {_line(error)}"
        return
    outcome.state = DOUBLE if _within(wide, torch.float64) and not wrong else WRONG
    if outcome.state == WRONG:
        found = f"off by {loss_off:.1e}, {grad_off:.1e}, in float64 by {wide.loss_off:.1e}, {wide.grad_off:.1e}"
        outcome.reason = wrong or found


def _within(outcome, dtype):
    loss, grad = TOLERANCE[dtype]
    return outcome.loss_off <= loss and outcome.grad_off <= grad


def general(reason):
    """A reason without the places of this machine."""
    return re.sub(r"(?:/[\w.+-]+)+/(\w+\.py)", r"\1", reason).partition("\n")[0][:300]


def _line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:250]}"
