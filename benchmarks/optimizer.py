"""Steps of FusedAdam against torch.optim.AdamW(fused=True), on the parameters of a model and on random gradients.

    python -m benchmarks.optimizer                          GPT-2 124M
    python -m benchmarks.optimizer --rows minilm --steps 20
    python -m benchmarks.optimizer --kinds sgd adagrad lamb  the other optimizers

Both take turns in one process; the figures are medians, the spread is the middle half. "with clipping": the norm of all
gradients, the step with it, zero_grad. The bandwidth counts what a step has to read and write (28 bytes a float32
parameter for Adam), next to that of copying one large tensor into another.
"""

import argparse
import copy
import time
from pathlib import Path

import torch

from benchmarks.report import machine, middle, milliseconds, write
from benchmarks.rows import ROWS
from ortmodule.optim import AdamWMode, FusedAdagrad, FusedAdam, FusedLamb, FusedSGD

COPIED = 512 << 20  # bytes of the tensor that is copied


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def side(parameters, make, clip):
    """The two measured functions: a step, and clipping, step and zero_grad. Gradients are those of before."""
    optimizer = make(parameters)

    def clipped():
        clip(optimizer, parameters)
        optimizer.step()
        optimizer.zero_grad()

    return optimizer.step, clipped


def clip_fused(optimizer, parameters):
    optimizer.clip_grad_norm(1.0)


def clip_torch(optimizer, parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


MOMENTUM = {"lr": 1e-6, "momentum": 0.9}
#: By kind: the bytes of a float32 parameter that a step reads and writes, and the optimizers that take turns.
KINDS = {
    "adam": (7 * 4, {  # p, m, v read and written, g read
        "AdamW(fused=True)": (lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True), clip_torch),
        "FusedAdam": (lambda p: FusedAdam(p, lr=1e-6, adam_w_mode=AdamWMode.ADAMW_TORCH), clip_fused),
    }),
    "sgd": (5 * 4, {
        "SGD(momentum, fused=True)": (lambda p: torch.optim.SGD(p, fused=True, **MOMENTUM), clip_torch),
        "FusedSGD": (lambda p: FusedSGD(p, **MOMENTUM), clip_fused),
    }),
    "adagrad": (5 * 4, {
        "Adagrad(fused=True)": (lambda p: torch.optim.Adagrad(p, lr=1e-6, fused=True), clip_torch),
        "FusedAdagrad": (lambda p: FusedAdagrad(p, lr=1e-6), clip_fused),
    }),
    "lamb": (10 * 4, {  # p, m and v are read twice
        "FusedLamb": (lambda p: FusedLamb(p, lr=1e-6), clip_fused),
    }),
}  # fmt: skip


def measure(row, kind, steps):
    torch.manual_seed(0)
    model = row.build()
    sides = {}
    for name, (make, clip) in KINDS[kind][1].items():
        parameters = list(copy.deepcopy(model).parameters())
        sides[name] = parameters, *side(parameters, make, clip)
    count = sum(p.numel() for p in model.parameters())
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    found = {name: {"step": [], "with clipping": []} for name in sides}
    copies = []
    for i in range(steps + 2):
        copies.append(seconds(lambda: target.copy_(source)))
        for name in list(sides)[:: 1 if i % 2 else -1]:
            parameters, step, clipped = sides[name]
            for p in parameters:
                p.grad = torch.full_like(p, 1e-3)
            times = seconds(step), seconds(clipped)
            if i >= 2:
                for what, spent in zip(found[name], times, strict=True):
                    found[name][what].append(spent)
    return {
        "parameters": count,
        "copy_bytes_per_second": 2 * COPIED / middle(copies[2:])["median"],
        **{name: {what: middle(times) for what, times in whats.items()} for name, whats in found.items()},
    }


def markdown(report):
    lines = [
        "| parameters of | optimizer | step, ms | GB/s | of a copy's | with clipping and zero_grad, ms |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    cases = [(row, kind, figures) for row, kinds in report["rows"].items() for kind, figures in kinds.items()]
    for row, kind, figures in cases:
        size, sides = KINDS[kind]
        for name in sides:
            step = figures[name]["step"]
            rate = size * figures["parameters"] / step["median"]
            cells = [
                ROWS[row].title.split(",")[0],
                name,
                milliseconds(step),
                f"{rate / 1e9:.1f}",
                f"{100 * rate / figures['copy_bytes_per_second']:.0f} %",
                milliseconds(figures[name]["with clipping"]),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["gpt2"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=["adam"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", default="results/optimizer")
    args = parser.parse_args()
    rows = {name: {kind: measure(ROWS[name], kind, args.steps) for kind in args.kinds} for name in args.rows}
    report = {"machine": machine(), "rows": rows}
    write(report, markdown(report), Path(args.out))
    print(markdown(report))


if __name__ == "__main__":
    main()
