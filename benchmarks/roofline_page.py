"""Writes docs/gpu-roofline.md: what benchmarks.roofline found of each row, beside the targets and what was measured."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.roofline_account import (
    ATTENTION,
    ATTENTION_DROPOUT,
    BANDWIDTH,
    LAUNCH,
    PEAK_BANDWIDTH,
    PEAK_PRODUCTS,
    PRODUCTS,
)

OURS, ALONE, EAGER, INDUCTOR = "ours", "ours, the loss alone", "eager", "Inductor"
ORDER = (OURS, ALONE, EAGER, INDUCTOR)
H100, H200 = "H100", "H200"
#: {GPU: {row: {column: (ms of a step, GB of its peak)}}}, NaN where it was not measured: docs/benchmarks-gpu.md, 25 and
#: 26 November, and 27 November. Plans have changed since; GPT-2's of ours on the H100: before flash attention drops.
MEASURED: dict[str, dict[str, dict[str, tuple[float, float]]]] = {
    H100: {
        "llama-1b": {OURS: (66.8, 26.0), EAGER: (96.9, 25.6)},
        "bert-large": {OURS: (190.0, 42.2), EAGER: (130.0, 27.0)},
        "gpt2-medium": {OURS: (172.0, 42.8), EAGER: (143.0, 28.2)},
    },
    H200: {
        "llama-1b": {OURS: (63.5, 26.1), EAGER: (86.4, 25.6), INDUCTOR: (66.7, 22.4)},
        "bert-large": {OURS: (109.0, 21.2), EAGER: (120.0, 27.0), INDUCTOR: (98.7, 23.3)},
        "gpt2-medium": {OURS: (78.6, 22.5), EAGER: (123.3, 28.2), INDUCTOR: (59.6, 16.9)},
        "bert-large-padded": {OURS: (81.1, 15.5), EAGER: (123.5, 27.4), INDUCTOR: (93.6, 23.3)},
        "gpt2-medium-padded": {EAGER: (134.9, 28.6)},
    },
}
OF_EAGER, OF_INDUCTOR, OF_INDUCTOR_PADDED, MEMORY = 1.3, 1.0, 1.4, 0.65
HELD, TOUCHED = 16, 28  # bytes a parameter: of the four tensors that AdamW reads, and with those that it writes
LISTED, ALIVE = 12, 6  # operators that cost most beyond their least bytes; kinds of memory that are most of a peak

TOP = """# GPU roofline

How long training steps should take on an H100, predicted without one: each kernel of a step with the bytes that it
moves, the least bytes possible, its floating-point operations (FLOPs) and launches. The sum of the kernels is the
predicted step. The same account is made of what eager PyTorch and Inductor (torch.compile) must move. Parameters are
float32, steps run under bfloat16 autocast with `torch.optim.AdamW(fused=True)`.

`ORTMODULE_BUILD=build/emulated python -m benchmarks.roofline [ROW...]` makes this page. It needs an emulated build
([architecture/testing.md](architecture/testing.md)) and a few minutes a row; no weights have memory, and no step runs.
Every kernel is in a table a row, `docs/gpu-roofline/ROW.csv`, which the command writes, too: equal ones are one line
that says how many there are. Here those of one operator are one line.

## What is measured, what is predicted

Nothing on this page is measured, except for the rates and the columns that say so, which
[benchmarks-gpu.md](benchmarks-gpu.md) has. Predicted is: a kernel takes the larger of bytes over bandwidth and FLOPs
over the rate of its kind, and a launch where no CUDA graph starts it.
"""

RATES = [
    ("Bandwidth of all kernels", f"{BANDWIDTH / 1e12:.2f} TB/s", f"{BANDWIDTH / PEAK_BANDWIDTH:.0%}",
     "cross entropy of 8192 × 32,000 floats in 1.45 ms (2.2 TB/s), AdamW of 67 million parameters in 0.905 ms "
     "(2.1 TB/s)"),
    ("Products of 16-bit floats", f"{PRODUCTS / 1e12:.0f} TFLOP/s", f"{PRODUCTS / PEAK_PRODUCTS:.0%}",
     "a linear layer, 8192 × 1024 to 4096, with gradients in 0.365 ms"),
    ("Attention, scores not in memory", f"{ATTENTION / 1e12:.0f} TFLOP/s", f"{ATTENTION / PEAK_PRODUCTS:.0%}",
     "cuDNN's: 8 × 1024 tokens, 16 heads of 64, causal, forward and backward in 0.26 ms"),
    ("The same with dropout (flash)", f"{ATTENTION_DROPOUT / 1e12:.0f} TFLOP/s",
     f"{ATTENTION_DROPOUT / PEAK_PRODUCTS:.0%}", "eager's in 0.440 ms, which has the host's time in it"),
    ("Launch without a CUDA graph", f"{LAUNCH * 1e6:.0f} µs", "", "assumed"),
]  # fmt: skip

RULES = """
The rates are those of single operators, and have some of the host's time in them: large products of a step are faster
than that. All columns get the same rates, so quotients are worth more than milliseconds.

Rules of the account:

- **Ours** is the plan of the step for a GPU, whose logits the script does not read. An operand counts once a kernel,
  whatever reads it twice inside; of a broadcast or a slice what is read. A result that nothing reads is not written.
  Gradients of norms have sums of parts of the rows, attention's backward has sums in float32, what torch's attention
  has allocated is copied, a linear layer's loss has the logits of 4096 rows at a time in memory: the kernels do so. All
  but attention are in CUDA graphs. Casts are those of autocast on the CPU, which the emulated GPU has.
- **Ours, the loss alone**: the same where forward returns the loss and no logits.
- **Eager** is a trace of ATen operators, forward and backward, with a GPU's autocast. Each reads its operands once and
  writes its results once; attention is one kernel forward and three backward, with a mask as fast as without one (in
  favour of eager).
- **Inductor** is the same trace by a rule, not by Inductor: an operator that is no product, attention or gradient of an
  embedding joins the kernel of the latest operator that it reads from, if that is such a one, too, of the same
  direction, and their largest tensors have equally many elements. A kernel reads once what comes from elsewhere, and
  writes what is read elsewhere. Values that backward computes again are not thought of; a reduction that needs a second
  pass over its row counts as one pass (in favour of Inductor). Its peak memory is not predicted.
- **AdamW**, fused, is the same in all columns: 28 bytes a parameter.
- **Least bytes**: what would be left if all neighbouring kernels of one direction that are no products, attention or
  gradients of embeddings were one kernel, reading once what comes from elsewhere and writing what is read elsewhere.
- Peak memory is by the plan (`ortmodule.memory`), eager's by the storages alive in the trace, both with AdamW's states.

What kernels move is counted on an emulated GPU, access by access, a byte once a launch (`tests/cuda/test_traffic.py`):
norms, softmaxes, losses, casts and chains move what the account says, and read rows of 1024 elements once. All kernels
but products and attention of a step of two layers of 128 moved 96% (Llama, BERT) and 97% (GPT-2) of the account, which
has more of gradients of embeddings than they move.
"""

COPIED = "Contiguous, of a gradient"


def copied(rows: dict[str, Any]) -> str:
    """What is copied of gradients to the tensors that they belong to."""
    found = {}
    for name, row in rows.items():
        of = [k for k in row["columns"][OURS]["kernels"] if k["name"] == COPIED]
        if of:
            found[name] = f"`{name}` {len(of)} ({sum(k['bytes'] for k in of) / 1e9:.2f} GB moved)"
    there = "; ".join(found.values()) if found else "none in any row"
    return (
        "Gradients are written where their owners have them, by the kernels that compute them, so a second stream "
        f"would have little to overlap. Copies of gradients: {there}."
    )


ROW_PASSES = ("label_sparsity", "linear_loss", "padding_removal")
WHY = """
Why, as far as the plans say it:

- A mask of keys that is data (BERT's, and all with padding) goes to torch's kernels as lists of rows where padding is
  left out, and as lists of keys where every query is seen; one that hides nothing is dropped
  ([CUDA libraries](architecture/cuda-libraries.md)). FLOPs of attention over lists are those of lengths spread evenly
  from 0 to twice their mean.
- Logits that forward gives back and the script does not read are not computed (`ortmodule/runtime/lazy_logits.py`): so
  it is from the third such call on.
- So do the keys and values of all tokens that GPT-2 and Llama give back: padding is left out there, too.
"""


def decided(rows: dict[str, Any]) -> list[str]:
    """What decides most: how many layers' attention is one operator, and the passes that leave rows out."""
    lines = [
        "| Row | Attention as one operator | scores in memory | Passes that leave rows out | with the loss alone |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for name, row in rows.items():
        names = [k["name"] for k in row["columns"][OURS]["kernels"]]
        fired = [
            ", ".join(f"`{p}`" for p in ROW_PASSES if p in row["columns"][c].get("fired", {})) or "none"
            for c in (OURS, ALONE)
        ]
        counts = names.count("FusedAttention"), names.count("MaskedSoftmax")
        lines.append(f"| `{name}` | {counts[0]} | {counts[1]} | {fired[0]} | {fired[1]} |")
    return lines


def far_off(rows: dict[str, Any]) -> list[str]:
    """How far predictions are from what was measured."""
    lines = ["| Row | Step | Predicted, ms | H100, ms | H200, ms | Predicted peak, GB | H100, GB | H200, GB |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name, row in rows.items():
        for column in (OURS, EAGER, INDUCTOR):
            seen = [MEASURED[gpu].get(name, {}).get(column) for gpu in (H100, H200)]
            if not any(seen):
                continue
            found = row["columns"][column]
            ms, peaks = ([f"{pair[i]:g}" if pair else "–" for pair in seen] for i in (0, 1))
            peak = f"{found['peak'] / 1e9:.1f}" if found["peak"] else "–"
            cells = [f"`{name}`", column, f"{1e3 * totals(found)['seconds']:.1f}", *ms, peak, *peaks]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def totals(column: dict[str, Any]) -> dict[str, float]:
    return {key: sum(k[key] for k in column["kernels"]) for key in ("count", "bytes", "least", "flops", "seconds")}


def met(value: float, target: float, more: bool = True) -> str:
    return "" if (value >= target if more else value <= target) else " **below**" if more else " **above**"


def dense_or_padded(name: str) -> float:
    return OF_INDUCTOR_PADDED if name.endswith("-padded") else OF_INDUCTOR


def fixed(row: dict[str, Any]) -> float:
    """Bytes of weights, gradients and AdamW's states, all of which its kernels touch."""
    return sum(k["bytes"] for k in row["columns"][OURS]["kernels"] if k["name"] == "AdamW") * HELD / TOUCHED


def summary(rows: dict[str, Any]) -> list[str]:
    """One line a row and way of ours: predicted, beside the targets and what was measured."""
    lines = [
        "| Row | Ours, ms | Eager, ms | Inductor, ms | × eager | × Inductor | Peak, GB: ours, eager | Share (fixed) | "
        "Measured, ms: ours, eager |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in rows.items():
        ms = {c: 1e3 * totals(row["columns"][c])["seconds"] for c in ORDER}
        eager_peak = row["columns"][EAGER]["peak"]
        for column in (OURS, ALONE):
            peak, mine = row["columns"][column]["peak"], ms[column]
            seen = MEASURED[H100].get(name, {}) if column == OURS else {}
            cells = [
                f"`{name}`" + (", the loss alone" if column == ALONE else ""), f"{mine:.1f}", f"{ms[EAGER]:.1f}",
                f"{ms[INDUCTOR]:.1f}", f"{ms[EAGER] / mine:.2f}{met(ms[EAGER] / mine, OF_EAGER)}",
                f"{ms[INDUCTOR] / mine:.2f}{met(ms[INDUCTOR] / mine, dense_or_padded(name))}",
                f"{peak / 1e9:.1f}, {eager_peak / 1e9:.1f}",
                f"{peak / eager_peak:.0%}{met(peak / eager_peak, MEMORY, more=False)} ({fixed(row) / eager_peak:.0%})",
                ", ".join(f"{seen[c][0]:g}" for c in (OURS, EAGER)) if seen else "–",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def by_operator(column: dict[str, Any]) -> list[list]:
    """[operator, kernels, bytes, least bytes, FLOPs, seconds, seconds beyond the least], the longest first."""
    found: dict[str, list] = defaultdict(lambda: [0, 0, 0, 0.0, 0.0, 0.0])
    for k in column["kernels"]:
        beyond = min(k["seconds"], (k["bytes"] - k["least"]) / BANDWIDTH)
        for i, x in enumerate((k["count"], k["bytes"], k["least"], k["flops"], k["seconds"], beyond)):
            found[k["name"]][i] += x
    return sorted(([name, *row] for name, row in found.items()), key=lambda row: -row[5])


def worst(rows: dict[str, Any]) -> list[str]:
    """The operators of ours that take longest beyond their least bytes, in all rows together; a column is a row."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, row in rows.items():
        for operator, *_, beyond in by_operator(row["columns"][OURS]):
            found[operator][name] = 1e3 * beyond
    lines = [
        "| Operator | " + " | ".join(f"`{name}`" for name in rows) + " |",
        "| --- |" + " ---: |" * len(rows),
    ]
    for operator, each in sorted(found.items(), key=lambda item: -sum(item[1].values()))[:LISTED]:
        lines.append(f"| {operator} | " + " | ".join(f"{each.get(name, 0.0):.1f}" for name in rows) + " |")
    return lines


def scores(column: dict[str, Any]) -> float:
    """Seconds of the kernels that stand for attention where scores are in memory."""
    names = ("MaskedSoftmax", "SoftmaxGrad", "SoftmaxDropout", "SoftmaxDropoutGrad", "Softmax", "DropoutTrain")
    return sum(k["seconds"] for k in column["kernels"] if k["name"] in names)


def quotients(rows: dict[str, Any]) -> list[str]:
    """How far the predicted quotients to eager and to torch.compile are from the measured ones."""
    lines = []
    for other, title in ((EAGER, "eager"), (INDUCTOR, "torch.compile")):
        found = []
        for name in rows:
            ours, theirs = (totals(rows[name]["columns"][c])["seconds"] for c in (OURS, other))
            text = f"`{name}` {theirs / ours:.2f} predicted"
            for gpu in (H100, H200):
                seen = MEASURED[gpu].get(name, {})
                if OURS in seen and other in seen:
                    text += f", {seen[other][0] / seen[OURS][0]:.2f} on the {gpu}"
            found += [text] * ("on the" in text)
        if found:
            lines += [f"Times as fast as {title}: " + "; ".join(found) + ".", ""]
    return lines


def peaks(rows: dict[str, Any]) -> list[str]:
    """What is in memory at the peak of ours beside what every way has."""
    lines = ["| Row | Fixed, GB | Beyond it, GB: ours, eager | Share | Most of it |",
             "| --- | ---: | ---: | ---: | --- |"]  # fmt: skip
    for name, row in rows.items():
        ours, eager = row["columns"][OURS], row["columns"][EAGER]
        held = fixed(row)
        beyond = [column["peak"] - held for column in (ours, eager)]
        most = sorted(ours.get("alive", {}).items(), key=lambda item: -item[1])[:ALIVE]
        lines.append(
            f"| `{name}` | {held / 1e9:.1f} | {beyond[0] / 1e9:.1f}, {beyond[1] / 1e9:.1f} | "
            f"{beyond[0] / beyond[1]:.0%} | " + ", ".join(f"{what} {size / 1e9:.2f}" for what, size in most) + " |"
        )
    return lines


def unreachable(rows: dict[str, Any]) -> list[str]:
    """Which rows cannot meet the target of memory, whatever is done."""
    names = []
    for name, row in rows.items():
        share = fixed(row) / row["columns"][EAGER]["peak"]
        if share > MEMORY:
            names.append(f"`{name}` ({share:.0%})")
    if not names:
        return []
    return [
        f"{MEMORY:.0%} of eager's peak cannot be met by {', '.join(names)}: weights, gradients and AdamW's states",
        "alone are more than that.", "",
    ]  # fmt: skip


def kernels(row: dict[str, Any]) -> str:
    """All kernels of a row's steps, as lines of values between commas; equal ones of a step are one line."""
    lines = ["step,operator,kind,times,kernels each,bytes each,least bytes each,FLOPs each,microseconds each"]
    for column in ORDER:
        found: dict[tuple, int] = defaultdict(int)
        for k in row["columns"][column]["kernels"]:
            values = k["count"], k["bytes"], k["least"], f"{k['flops']:.0f}", f"{1e6 * k['seconds']:.2f}"
            found[k["name"], k["kind"], *values] += 1
        for (name, kind, *others), times in found.items():
            lines.append(",".join(map(str, (f'"{column}"', f'"{name}"', kind, times, *others))))
    return "\n".join(lines) + "\n"


def section(name: str, row: dict[str, Any]) -> list[str]:
    lines = [f"## {row['title']} (`{name}`), {row['samples']} samples", ""]
    lines += [
        "| Step | Kernels | GB moved | Least GB | TFLOP | ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for column in ORDER:
        t = totals(row["columns"][column])
        lines.append(
            f"| {column} | {t['count']} | {t['bytes'] / 1e9:.1f} | {t['least'] / 1e9:.1f} | {t['flops'] / 1e12:.1f} | "
            f"{1e3 * t['seconds']:.1f} |"
        )
    for column in (OURS, EAGER):
        title = "Ours" if column == OURS else "Eager"
        lines += [
            "", f"{title}, by operator:", "",
            "| Operator | Kernels | GB moved | Least GB | TFLOP | ms |", "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]  # fmt: skip
        for operator, kernels, moved, least, flops, seconds, _ in by_operator(row["columns"][column]):
            lines.append(
                f"| {operator} | {kernels} | {moved / 1e9:.2f} | {least / 1e9:.2f} | {flops / 1e12:.2f} | "
                f"{1e3 * seconds:.2f} |"
            )
    return [*lines, ""]


def page(rows: dict[str, Any]) -> str:
    lines = [TOP, "| What | Rate | Share of the peak | Where it comes from |", "| --- | ---: | ---: | --- |"]
    lines += ["| " + " | ".join(cells) + " |" for cells in RATES]
    lines += [
        RULES, "## Predicted steps", "",
        f"Targets: {OF_EAGER} × eager; {OF_INDUCTOR} × Inductor with dense batches, {OF_INDUCTOR_PADDED} × with half",
        f"padding; at most {MEMORY:.0%} of eager's peak memory; in brackets what weights, gradients and AdamW's",
        "states are of it, which every way has. What misses one says so.", "",
        *summary(rows), "",
        *unreachable(rows),
        "What is in memory at the peak of ours, beyond weights, gradients and AdamW's states:", "", *peaks(rows), "",
        "How far the account is from the steps that GPUs have measured. An H200 has the H100's processors and 4.8 TB/s",
        "in place of 3.35, and the account is of an H100. Measured are steps as they were planned then, and plans have",
        "changed since ([benchmarks-gpu.md](benchmarks-gpu.md)): GPT-2's on the H100 had no flash attention with",
        "dropout. Measured peaks are the most that torch's allocator had given out:", "", *far_off(rows), "",
        *quotients(rows),
        "## The next work", "",
        "Milliseconds a step of ours beyond the least bytes, the operators that take most:", "", *worst(rows), "",
        "Where attention keeps scores in memory, softmax, its gradient and dropout alone take, in milliseconds a step:",
        ", ".join(f"`{name}` {1e3 * scores(row['columns'][OURS]):.1f}" for name, row in rows.items()) + ".", "",
        copied(rows), "",
        "What decides most:", "", *decided(rows), WHY,
    ]  # fmt: skip
    for name, row in rows.items():
        lines += section(name, row)
    return "\n".join(lines).rstrip() + "\n"
