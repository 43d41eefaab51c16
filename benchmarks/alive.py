"""Write what is alive at the peak of each benchmark row, by module path and kind, and why.

    python -m benchmarks.alive                               the usual rows
    python -m benchmarks.alive --rows gpt2 resnet-18 --out results/alive.md

No step runs: each row is planned on the meta device, in float32 and with bfloat16 autocast. Layers that are alike are
one line, with * for their numbers. Parameters, gradients of parameters and the optimizer's states are apart.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.rows import EVERY, ROWS
from ortmodule import memory
from ortmodule.debug.peak import in_units

MOST = 8  # lines of a table
TOP = """# What is alive at the peak of a step

What a step holds at its peak, by module path and kind, as planned: `python -m benchmarks.alive --out
docs/benchmarks-memory.md` makes this page, and `print(ortmodule.memory.predict(model, ...))` shows the same of your own
step ([memory](how-to-memory.md)). On the CPU large gradients take the place of activations that backward is done with,
so a peak lies where backward begins, with the logits' gradient and all that forward keeps, or near its end, where
nearly all gradients are there and few activations. What backward computes again is not kept, and so in no table
([recomputation](architecture/recomputation.md)). Settings are the defaults.

"""
IN_ARENA = ("activation", "workspace", "gaps")


def peak_of(key, autocast):
    """The predicted peak of a step of this row."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = EVERY[key].build().train()
    batch = EVERY[key].batch(torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return memory.predict(model, **batch, optimizer="adamw")


def why(tensor):
    if tensor.kind == "gaps":
        return "between blocks"
    if tensor.kind == "workspace":
        return "scratch memory of the kernel that runs"
    return "a gradient on its way" if tensor.name.startswith("gradient at") else "forward made it, backward reads it"


def lines_of(peak):
    """(bytes, tensors, module path, what, type and shape, why) of what is in the arena, the most first."""
    sums, counts = defaultdict(int), defaultdict(int)
    for tensor in peak.tensors:
        if tensor.kind in IN_ARENA:
            path = re.sub(r"(?<=\.)\d+|^\d+", "*", tensor.module)
            spec = f"{tensor.dtype}{list(tensor.shape)}" if tensor.dtype else ""
            key = path, tensor.name.removeprefix("gradient at "), spec, why(tensor)
            sums[key] += tensor.bytes
            counts[key] += 1
    return sorted(((count, counts[key], *key) for key, count in sums.items()), key=lambda line: -line[0])


def section(key, autocast, peak):
    kind = "bfloat16 autocast" if autocast else "float32"
    parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
    split = ", ".join(f"{part} {in_units(getattr(peak, part))}" for part in parts)
    found = lines_of(peak)
    rows = [f"| {in_units(size)} | {100 * size / peak.arena:.0f} % | {n} | {path or '–'} | {what} | {spec} | {reason} |"
            for size, n, path, what, spec, reason in found[:MOST]]  # fmt: skip
    rest = sum(line[0] for line in found[MOST:])
    rows += (
        [f"| {in_units(rest)} | {100 * rest / peak.arena:.0f} % | {len(found) - MOST} lines | | | | |"] if rest else []
    )
    head = "| bytes | of the arena | tensors | module | operator | each | why |\n|---:|---:|---:|---|---|---|---|"
    return f"## {EVERY[key].title}, {kind}\n\n{split}.\n\n{head}\n" + "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(EVERY), metavar="ROW")
    parser.add_argument("--out", type=Path, help="a file for the page; otherwise it is printed")
    args = parser.parse_args()
    found = [section(key, autocast, peak_of(key, autocast)) for key in args.rows for autocast in (False, True)]
    page = TOP + "\n".join(found)
    if args.out:
        args.out.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
