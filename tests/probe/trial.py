"""Runs one operator of torch's own list on its sample inputs, through the engine and in PyTorch.

The list is `torch.testing._internal.common_methods_invocations.op_db`: every entry that has gradients on the CPU. A
sample becomes a module whose inputs are the sample's tensors; all else is written into it. Values, types, which results
carry a gradient, and the gradients have to be PyTorch's, in either. Where PyTorch itself draws random numbers only
types, shapes and finiteness are compared.
"""

import re
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ortmodule import DebugOptions, LogLevel, ORTModule, explain
from ortmodule.core.tolerance import is_rounding, rounded
from tests.tolerances import FUNCTION, largest

#: Times the tolerance, if that is less than half of everything. The gradient of a row of one element is zero, and
#: rounding 1 / sqrt(eps) times as large as elsewhere; PyTorch's own gradient of logcumsumexp takes logarithms of
#: gradients; an attention's scores have its operands' type, and those here are near 50. The gradient of a number beside
#: five elements is a sum that cancels in hypot's first sample: over 200 draws ours is off by 0.0029 on average in
#: bfloat16, PyTorch's by 0.0032.
COARSE = {"nn.functional.layer_norm": 10, "logcumsumexp": 20, "nn.functional.normalize": 10}
COARSE |= {"nn.functional.scaled_dot_product_attention": 4, "hypot": 4}
VANISHED = 16  # roundings of 1: a sum that is no larger in float64 has cancelled, and has to be no more than rounding
#: The order of equal elements is not defined: only samples without such.
UNORDERED = {"sort", "msort", "topk", "argsort", "kthvalue", "median", "nanmedian"}
FEW = 6  # samples of an entry in a short run

NATIVE, MIXED, FALLBACK, WRONG = "native", "mixed", "fallback", "wrong"


def name_of(entry):
    return entry.name + (f".{entry.variant_test_name}" if entry.variant_test_name else "")


def supports(entry, dtype):
    """Sparse tensors are not for the engine."""
    if entry.name.startswith("sparse."):
        return False
    return entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")


ENTRIES = {name_of(entry): entry for entry in op_db if supports(entry, torch.float32)}
DTYPES = ("float32", "float64", "bfloat16", "float16")


def names_of(dtype):
    """The entries that have gradients in this type."""
    return [name for name, entry in ENTRIES.items() if supports(entry, dtype)]


@dataclass
class Outcome:
    """What became of an entry: how many samples the engine ran, why PyTorch ran the others, what went wrong."""

    name: str
    samples: int = 0
    native: int = 0
    reasons: Counter = field(default_factory=Counter)
    inside: Counter = field(default_factory=Counter)  # operators that PyTorch runs inside the graph
    wrong: list[str] = field(default_factory=list)

    @property
    def state(self):
        if self.wrong:
            return WRONG
        if self.native == self.samples:
            return NATIVE
        return MIXED if self.native else FALLBACK


class OneOperator(nn.Module):
    """An operator on a sample: forward takes the sample's tensors."""

    def __init__(self, entry, sample):
        super().__init__()
        leaves, self.spec = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
        self.operator, self.process = entry.op, sample.output_process_fn_grad
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i] for i in self.places]

    def forward(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = tree_unflatten(leaves, self.spec)
        with mock.patch.object(torch, "manual_seed", _nothing):  # some entries seed; forward of a module should not
            return self.process(self.operator(first, *args, **kwargs))


def times_of(name, tensors):
    """Times the tolerance; 1 where more would let half of anything pass, in 16 bits."""
    times, kinds = COARSE.get(name, 1), {t.real.dtype for t in tensors} & FUNCTION.keys()
    return times if all(times * sum(FUNCTION[kind]) < 0.5 for kind in kinds) else 1


def _nothing(seed):
    """Seeds no generator."""


def run(module, tensors, seed=0):
    """Results, which of them carry a gradient, and the gradients of the inputs that want one."""
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    torch.manual_seed(seed)
    results = [r for r in tree_flatten(module(*tensors))[0] if isinstance(r, torch.Tensor)]
    followed = [r for r in results if r.requires_grad]
    grads = []
    if followed:
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in followed]
        wanted = [t for t in tensors if t.requires_grad]
        grads = torch.autograd.grad(followed, wanted, weights, allow_unused=True)
        grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    return [r.detach() for r in results], [r.requires_grad for r in results], [g.detach() for g in grads]


def apart(found, expected, exactly=True, times=1):
    """In which way two tensors are not the same, at `times` the tolerance, or an empty string."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (found, expected)]
        return "{}, not {}".format(*kinds)
    if not exactly:
        return "" if found.isfinite().all() or not expected.isfinite().all() else "not finite"
    if not found.is_floating_point() and not found.is_complex():
        return "" if torch.equal(found, expected) else f"{_short(found)}, not {_short(expected)}"
    wrong = ~_close(found, expected, times)
    if not wrong.any():
        return ""
    wide = torch.complex128 if found.is_complex() else torch.float64
    off = (found.to(wide) - expected.to(wide))[wrong].abs().max()
    if not off.isfinite():
        return f"not finite in the same places: {_short(found[wrong])}, not {_short(expected[wrong])}"
    return f"off by {off:.3g} of {expected[expected.isfinite()].abs().max():.3g}"


def _close(found, expected, times=1):
    """Zeros are never close to something else, however small."""
    relative, share = FUNCTION[found.real.dtype]
    assert times * (relative + share) < 1
    return alike(found, expected, times * relative, times * share * largest(expected))


def alike(found, expected, relative=0.0, absolute=0.0):
    """Which elements are the same: NaN equals NaN, infinities and integers themselves."""
    if not found.is_floating_point() and not found.is_complex():
        return found == expected
    wide = torch.complex128 if found.is_complex() else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    near = (found - expected).abs() <= relative * expected.abs() + absolute
    return torch.where(expected.isfinite(), near, (found == expected) | (found.isnan() & expected.isnan()))


def _short(tensor):
    return str(tensor.reshape(-1)[:8].tolist())


def difference(found, expected, exactly=True, times=1):
    (results, follow, grads), (expected_results, expected_follow, expected_grads) = found, expected
    if len(results) != len(expected_results):
        return f"{len(results)} results, not {len(expected_results)}"
    if follow != expected_follow:
        return f"gradients flow through {follow}, not {expected_follow}"
    for what, ours, theirs in (("result", results, expected_results), ("gradient", grads, expected_grads)):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            if text := apart(*pair, exactly, times):
                return f"{what} {i} {text}"
    return ""


class _Draws(TorchDispatchMode):
    """Sees whether random numbers are drawn."""

    found = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found |= torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


def is_random(module, tensors):
    with _Draws() as draws:
        module(*(t.detach() for t in tensors))
    return draws.found


def is_exact(module, found, expected, times=1):
    """Is this as good an answer as PyTorch's, by what it computes in float64? Its own may be the less accurate.

    Of float64 there is no exact answer: there one rounding of the operands has to move PyTorch's about as far.
    """
    if any(t.real.dtype == torch.float64 for t in module.tensors if t.real.dtype in FUNCTION):
        moved = run(module, [rounded(t.detach()).requires_grad_(t.requires_grad) for t in module.tensors])
        pairs = [three for part in (0, 2) for three in zip(found[part], expected[part], moved[part], strict=True)]
        return found[1] == expected[1] and all(not apart(*three[:2]) or is_rounding(*three) for three in pairs)
    try:
        wide = run(module, [t.detach().double().requires_grad_(t.requires_grad) if t.dtype in FUNCTION else t
                            for t in module.tensors])  # fmt: skip
    except Exception:
        return False
    return as_good(found, expected, wide, times)


def as_good(found, expected, wide, times=1):
    """Of what `run` returns, here, in PyTorch and in float64: is each tensor as good an answer as PyTorch's?"""
    if found[1] != expected[1] or len(found[0]) != len(expected[0]):
        return False
    return all(
        not apart(ours, theirs) or _as_near(ours, theirs, exact, times)
        for part in (0, 2)
        for ours, theirs, exact in zip(found[part], expected[part], wide[part], strict=True)
    )


def _as_near(ours, theirs, exact, times):
    """Every element as PyTorch's or within the tolerance of the exact answer; or all no farther from it than twice
    PyTorch's."""
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype) or not ours.is_floating_point():
        return False
    if (_close(ours, theirs) | _close(ours, exact.to(ours.dtype))).all():
        return True
    vanished = largest(exact) <= VANISHED * torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
    if vanished and ours.isfinite().all() and largest(ours) <= times * FUNCTION[ours.dtype][1]:
        return True
    off, bound = (ours.double() - exact).abs(), (theirs.double() - exact).abs()
    return bool(off.isfinite().all() and bound.isfinite().all() and off.max() <= 2 * bound.max())


def probe(name, dtype=torch.float32, most=None):
    """Runs entry ``name`` on its samples of ``dtype``, or on ``most`` of them, evenly spread."""
    entry, outcome = ENTRIES[name], Outcome(name)
    torch.manual_seed(0)
    samples = [s for s in entry.sample_inputs("cpu", dtype, requires_grad=True) if not is_empty(s)]
    if name in UNORDERED:
        samples = [s for s in samples if s.input.unique().numel() == s.input.numel()]
    if most is not None and len(samples) > most > 1:
        samples = [samples[i * (len(samples) - 1) // (most - 1)] for i in range(most)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples:
            reason = _probe_sample(entry, sample, outcome)
            if reason == "forward computes nothing":
                continue
            outcome.samples += 1
            if reason:
                outcome.reasons[reason] += 1
            else:
                outcome.native += 1
    return outcome


def is_empty(sample):
    """The engine leaves calls with an empty input to PyTorch."""
    return any(isinstance(t, torch.Tensor) and t.numel() == 0 for t in tree_flatten((sample.input, sample.args))[0])


def _probe_sample(entry, sample, outcome):
    """Why PyTorch ran the sample, or None. A difference goes into ``outcome.wrong``."""
    module = OneOperator(entry, sample)
    try:
        expected = run(module, module.tensors)
    except Exception as error:
        return f"PyTorch: {_line(error)}"
    ours = ORTModule(module, DebugOptions(log_level=LogLevel.ERROR))
    try:
        found = run(ours, module.tensors)
        times = times_of(name_of(entry), module.tensors)
        text = difference(found, expected, times=times)
        if text and is_random(module, module.tensors):
            text = difference(found, expected, exactly=False)
        elif text and is_exact(module, found, expected, times):
            text = ""
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{_line(error)} ({place.filename.rpartition('/')[2]}:{place.lineno})"
    report = explain(ours)
    outcome.inside.update(report.aten_ops if report.captured else ())
    if text:
        outcome.wrong.append(f"{sample.summary() if hasattr(sample, 'summary') else ''}: {text}"[:400])
    return None if report.captured else general(report.fallback)


def general(reason):
    """A reason without what is true for one sample only."""
    reason = re.sub(r"\S*/(\w+\.py):\d+", r"\1", reason or "not called")
    reason = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "n", reason)
    reason = re.sub(r"\[(n, )*n?\]", "[n]", reason)
    return reason.partition("\n")[0][:160]


def _line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
