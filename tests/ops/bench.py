"""Times the operator cases on large tensors: the engine's forward and backward against PyTorch's.

    python -m tests.ops.bench --family softmax --dtype float32 --out times.json

The operands are the case's `large` ones or its own with every size multiplied, as far as the case still makes sense
then. Both sides take turns; the figures are the least of many, in milliseconds, and ours / PyTorch's.
"""

import argparse
import json
import time
from dataclasses import replace
from functools import partial

import torch

from tests.ops.cases import FAMILIES
from tests.ops.harness import Trial, made, tensors_of, wanted_outputs

MOST, FEWEST = 1_000_000, 50_000  # elements of the largest operand
MOST_TOGETHER = 16_000_000  # elements that operands of different shapes may broadcast to


def largest(specs):
    return max((torch.Size(s.shape).numel() for s in specs if s), default=0)


def together(specs):
    """Elements that operands broadcast to; 0 where they do not."""
    try:
        return torch.broadcast_shapes(*(s.shape for s in specs if s)).numel()
    except RuntimeError:
        return 0


def scaled(specs, factor):
    """Every size but 1 multiplied: operands that went together still do."""
    return [
        replace(s, shape=tuple(d if d == 1 else d * factor for d in s.shape)) if s and s.fixed is None else s
        for s in specs
    ]


def large_operands(case):
    if case.large:
        return case.large
    factor = 1
    while 0 < largest(larger := scaled(case.inputs, factor * 2)) <= MOST and factor < MOST:
        if together(larger) > MOST_TOGETHER:
            break
        factor *= 2
    return scaled(case.inputs, factor)


def engine_calls(trial):
    """Functions that run the engine's forward and backward."""
    training = bool(trial.wrt)
    plan = trial.plan(training)
    given = [trial.tensors[i] for i in trial.fed]
    arena = torch.empty(plan.arena_bytes, dtype=torch.uint8)
    outputs, writes = tensors_of(made(plan.outputs)), tensors_of(made(spec for _, spec in plan.writes))
    grads, dys = [], []
    if training:
        grads = tensors_of(made(plan.input_grads))
        dys = [dy if spec else None for spec, dy in zip(plan.output_grads, trial.dys, strict=True)]
    return {
        "forward": lambda: plan.forward(arena, given, outputs, writes, 0),
        "backward": lambda: plan.backward(arena, given, outputs, dys, grads, 0),
    }


def owning(function, given):
    """`function`, whose results are put into memory of their own where they are views of what was `given`, of each
    other, or of less memory than they have elements: the engine's always have it."""
    seen = {x.untyped_storage().data_ptr() for x in given if x is not None}
    views = []
    for i, y in enumerate(function()):
        if y is not None:
            if y.untyped_storage().data_ptr() in seen or not y.is_contiguous():
                views.append(i)
            seen.add(y.untyped_storage().data_ptr())
    if not views:
        return function

    def owned():
        results = list(function())
        for i in views:
            results[i] = results[i].clone(memory_format=torch.contiguous_format)
        return results

    return owned


def torch_calls(trial):
    """The same in PyTorch; without "backward" where no output depends on a differentiable operand."""
    leaves = [x if x is None else x.detach().requires_grad_(i in trial.wrt) for i, x in enumerate(trial.tensors)]
    forward = partial(wanted_outputs, trial.case, leaves)
    calls = {"forward": owning(forward, leaves)}
    outputs = forward()
    reached = [(y, dy) for y, dy in zip(outputs, trial.dys, strict=False) if y.requires_grad]
    if reached:
        ys, dys = zip(*reached, strict=True)
        wrt = [leaves[i] for i in trial.wrt]
        calls["backward"] = owning(lambda: torch.autograd.grad(ys, wrt, dys, allow_unused=True, retain_graph=True), dys)
    return calls


def alternate(ours, theirs, seconds):
    """The least milliseconds of both, taking turns: what others do on the machine only adds."""
    times = ([], [])
    end = time.perf_counter() + seconds
    for call in (ours, theirs):
        call()
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, record in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            record.append((time.perf_counter() - start) * 1e3)
    return [round(min(t), 4) for t in times]


def time_case(case, dtype, seconds=0.3):
    """{"forward": [ours, torch], "backward": ...}, or None where the case cannot be made large or compared."""
    specs = large_operands(case)
    if case.op.startswith("Random"):  # the reference fills, and draws nothing
        return None
    if largest(specs) < FEWEST or any(s and 0 in s.shape for s in specs):
        return None
    try:
        trial = Trial(case, dtype, case.tensors(dtype, specs=specs))
        theirs, ours = torch_calls(trial), engine_calls(trial)
        for phase in theirs:  # a case may fix the size of its result
            ours[phase]()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return {"elements": largest(specs)} | {phase: alternate(ours[phase], theirs[phase], seconds) for phase in theirs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--op", help="only this operator")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", default="op_times.json")
    args = parser.parse_args()

    rows = []
    for family in args.family:
        for case in FAMILIES[family]:
            if args.dtype not in case.dtypes or (args.op and case.op != args.op):
                continue
            if not (times := time_case(case, args.dtype)):
                continue
            rows.append({"family": family, "case": case.label, "dtype": args.dtype, **times})
            for phase in ("forward", "backward"):
                if phase in times:
                    a, b = times[phase]
                    print(f"{case.label:50} {phase:9} {a:9.3f} ms, torch {b:9.3f} ms, {a / max(b, 1e-9):5.2f}")
    with open(args.out, "w") as file:
        json.dump(rows, file, indent=1)
    print(f"{len(rows)} cases in {args.out}")


if __name__ == "__main__":
    main()
