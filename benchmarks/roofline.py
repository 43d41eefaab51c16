"""Predicts training steps on an H100 without one, by an account of bytes and FLOPs, and writes docs/gpu-roofline.md.

    ORTMODULE_BUILD=build/emulated python -m benchmarks.roofline [ROW...]

needs a build with an emulated GPU, which plans as for a GPU; no weights have memory, and no step runs. Each row takes a
minute or two. What is found out of a row, kernel by kernel, is kept in results/roofline/ROW.json; the page, and a table
of all kernels a row in docs/gpu-roofline, are made from all rows that are there. --page makes only these.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import roofline_page
from benchmarks.roofline_account import Kernel, adamw, fused, least_bytes
from benchmarks.rows import EVERY, PADDED

ROWS = ("llama-1b", "bert-large", "gpt2-medium", "llama-1b-padded", "bert-large-padded", "gpt2-medium-padded")
#: Those of the steps that an H100 has measured (benchmarks/triage_items.py).
SAMPLES = {"llama-1b": 4, "bert-large": 32, "gpt2-medium": 8}
FOLDER, PAGE, TABLES = Path("results/roofline"), Path("docs/gpu-roofline.md"), Path("docs/gpu-roofline")
#: What has the bytes that an account calls fixed, or is the script's.
FIXED = ("parameter", "gradient", "optimizer")


class LossAlone(nn.Module):
    """A model of which the caller sees the loss alone, so that logits need not be there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def tie_weights(self) -> None:
        if hasattr(self.model, "tie_weights"):
            self.model.tie_weights()

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


def column(kernels: list[Kernel], kept: Iterable, peak: int, parameters: tuple[int, int]) -> dict[str, Any]:
    """Of a step with its optimizer. ``parameters``: their elements, and how many tensors."""
    step = [*kernels, adamw(*parameters)]
    least = [*least_bytes(kernels, kept), step[-1].bytes]
    rows = [
        {"name": k.name, "kind": k.kind, "count": k.count, "bytes": k.bytes, "least": b, "flops": k.flops,
         "seconds": k.seconds}
        for k, b in zip(step, least, strict=True)
    ]  # fmt: skip
    return {"kernels": rows, "peak": peak}


def account(build: Callable[[], nn.Module], batch: dict[str, Any], kind: torch.dtype | None, full: bool) -> dict:
    """{column: kernels and peak} of ours, ours with the loss alone, eager and Inductor."""
    roofline_plan = importlib.import_module("benchmarks.roofline_plan")
    roofline_aten = importlib.import_module("benchmarks.roofline_aten")
    with torch.device("meta"):
        held = list({id(p): p for p in build().parameters()}.values())
    parameters = sum(p.numel() for p in held), len(held)
    found = {}
    trace, kept, peak = roofline_aten.trace_of(build, batch, kind, full)
    found["eager"] = column(trace.kernels, kept, peak, parameters)
    found["Inductor"] = column(fused(trace.kernels, kept, same_size=True), kept, 0, parameters)
    for name, made in (("ours", build), ("ours, the loss alone", lambda: LossAlone(build()))):
        plan, peak = roofline_plan.plan_of(made, batch, kind)
        mine = roofline_plan.kernels_of(plan)
        found[name] = column(mine.kernels, mine.kept, peak.total, parameters)
        found[name] |= {"fired": dict(plan.fired), "plan": plan.text(), "alive": alive(peak)}
    return found


def alive(peak: Any) -> dict[str, int]:
    """{what: bytes} at the peak of ours, of what is not there in every way."""
    found: dict[str, int] = defaultdict(int)
    for tensor in peak.tensors:
        if tensor.kind not in FIXED:
            found[f"{tensor.kind} {tensor.name}".strip()] += tensor.bytes
    return found


def row_of(name: str) -> dict[str, Any]:
    row, samples = EVERY[name], SAMPLES[name.removesuffix("-padded")]
    batch = row.sized(samples)(torch.Generator().manual_seed(0))
    found = account(row.build, batch, torch.bfloat16, PADDED not in row.title)
    return {"title": row.title, "samples": samples, "columns": found}


def use_build() -> None:
    """Imports the package from where ORTMODULE_BUILD says, as the tests do."""
    if build := os.environ.get("ORTMODULE_BUILD"):
        sys.path.insert(0, str(Path(build).resolve()))
        importlib.import_module("ortmodule")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--page", action="store_true", help="only the page, from what was found before")
    args = parser.parse_args()
    if unknown := set(args.rows) - set(ROWS):
        parser.error(f"there is no row {', '.join(sorted(unknown))}")
    use_build()
    transformers.utils.logging.set_verbosity_error()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in () if args.page else args.rows or ROWS:
        (FOLDER / f"{name}.json").write_text(json.dumps(row_of(name)))
    there = {name: json.loads(file.read_text()) for name in ROWS if (file := FOLDER / f"{name}.json").exists()}
    PAGE.write_text(roofline_page.page(there))
    TABLES.mkdir(exist_ok=True)
    for name, row in there.items():
        (TABLES / f"{name}.csv").write_text(roofline_page.kernels(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
