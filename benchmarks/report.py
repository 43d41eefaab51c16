"""Reports what a benchmark says: medians with their spread, the machine, JSON, Markdown, a picture."""

import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.rows import EVERY


def middle(values):
    """Median and the middle half."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "low": low, "high": high}


def speedup(base, these):
    """How many times as fast as ``base``: the quotient of each turn's two times, as `middle` of all turns.

    Median and quartiles are of the same numbers. A quotient of two medians would be another statistic: when the machine
    was slow in some turns only, it may lie outside of these quartiles.
    """
    return middle([b / t for b, t in zip(base, these, strict=True)])


def gpu():
    """Device, driver and clocks, as nvidia-smi knows them."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,memory.total,power.limit"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):  # not every machine has it
        found = []
    values = found[0].split(", ") if found else []
    return {"device": torch.cuda.get_device_name(), **dict(zip(fields.split(","), values, strict=False))}


def cpu():
    """Its name, which tells little on virtual machines, with family and model."""
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    said = {key.strip(): value.strip() for key, _, value in reversed(lines)}
    if "model name" not in said:
        return platform.processor()
    numbers = [f"{key.removeprefix('cpu ')} {said[key]}" for key in ("cpu family", "model") if key in said]
    return said["model name"] + (f" ({', '.join(numbers)})" if numbers else "")


def package(name):
    """Its version. The engine may be a folder that pip knows nothing of, built elsewhere (scripts/gpu): then the commit
    that it was built from, which lies beside it."""
    try:
        return version(name)
    except PackageNotFoundError:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return "not installed"
        commit = Path(spec.origin).parents[1] / "commit"
        return f"of {commit.read_text().strip()}" if commit.exists() else "without metadata"


def machine(device="cpu"):
    packages = {name: package(name) for name in ("torch", "transformers", "ortmodule")}
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        **packages,
        **({"cuda": torch.version.cuda, **gpu()} if device != "cpu" else {}),
    }


def milliseconds(figure):
    half = (figure["high"] - figure["low"]) / 2
    return f"{1e3 * figure['median']:.0f} ±{1e3 * half:.0f}"


def markdown(report):
    """A table: a row each, and for every column step, speed-up, samples, first step, slowest later step, new
    shape, peak, final loss. What is in brackets and what ± means is said above it."""
    about = report["machine"]
    lines = [
        f"{about['cpu']}, {about['threads']} threads; " + ", ".join(f"{k} {about[k]}" for k in list(about)[3:]),
        "",
        f"step: median of {report['steps']} steps ± half of their interquartile range. speed: median, and in brackets "
        "the quartiles, of the first backend's time over this one's in each turn. new shape: median.",
        "",
        "| model | backend | step, ms | speed | samples/s | tokens/s | first step, s | first − warm, s "
        "| slowest − warm, s | new shape, ms | peak, MB | last loss |",
        "| --- | --- |" + " ---: |" * 10,
    ]
    for name, columns in report["rows"].items():
        for column, figures in columns.items():
            speed, new, peak = figures["speedup"], figures["new_shape"], figures.get("peak_bytes")
            tokens, loss = figures.get("tokens"), figures.get("last_loss")
            cells = [
                EVERY[name].title,
                column,
                milliseconds(figures["step"]),
                f"{speed['median']:.2f}× ({speed['low']:.2f}–{speed['high']:.2f})",
                f"{figures['samples'] / figures['step']['median']:.0f}",
                f"{tokens / figures['step']['median']:.0f}" if tokens else "–",
                f"{figures['first_step']:.2f}",
                f"{figures['first_minus_warm']:.2f}",
                f"{figures['slowest_minus_warm']:.2f}",
                "–" if new is None else f"{1e3 * new:.0f}",
                "–" if peak is None else f"{peak / 1e6:.0f}",
                "–" if loss is None else f"{loss:.3f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(report, table, out):
    """<out>.json and <out>.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1))
    out.with_suffix(".md").write_text(table)


def plot(report, path):
    """Bars: the phases of a step for every row and column, in ms."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["rows"]
    figure, axes = pyplot.subplots(len(rows), 1, figsize=(8, 0.6 + 1.1 * len(rows)), squeeze=False)
    for axis, (name, columns) in zip(axes[:, 0], rows.items(), strict=True):
        left = [0.0] * len(columns)
        for phase, color in zip(("forward", "backward", "optimizer"), ("#4c72b0", "#dd8452", "#8c8c8c"), strict=True):
            widths = [1e3 * figures["phases"][phase]["median"] for figures in columns.values()]
            axis.barh(list(columns), widths, left=left, color=color, label=phase)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axis.invert_yaxis()
        axis.set_title(EVERY[name].title, fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=7, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    axes[-1, 0].set_xlabel("ms a step", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
