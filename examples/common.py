"""Holds what the examples share: settings, the choice of a backend, the record of a training, its table and picture."""

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
import transformers

transformers.utils.logging.set_verbosity_error()

BACKENDS = {
    "eager": "PyTorch as it is",
    "ortmodule": "ORTModule(model)",
    "compile": "model.compile()",
}


def setting(default, text, **more):
    """A field of a dataclass of settings."""
    return field(default=default, metadata={"help": text, **more})


def parse(cls, argv=None, description=None, **defaults):
    """Settings of this dataclass from a command line (None: this process's); ``defaults`` take the place of its own."""
    parser = transformers.HfArgumentParser(
        cls, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(**defaults)
    (settings,) = parser.parse_args_into_dataclasses(argv)
    return settings


def with_backend(model, backend):
    if backend == "ortmodule":
        from ortmodule import ORTModule

        return ORTModule(model)
    if backend == "compile":
        model.compile()  # it keeps its class, and the signature of its forward, which Trainers read
    return model


@dataclass
class Record:
    """The figures of one training, saved as <folder>/<backend>.json."""

    backend: str
    measure: str  # what evaluation reports: "accuracy", "perplexity"
    losses: list = field(default_factory=list)
    seconds: list = field(default_factory=list)  # of each step: forward, backward, optimizer
    samples: list = field(default_factory=list)  # in each step
    evaluations: list = field(default_factory=list)  # (steps done, figure)
    machine: str = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"

    def step(self, loss, seconds, samples):
        self.losses.append(loss)
        self.seconds.append(seconds)
        self.samples.append(samples)

    @property
    def samples_per_second(self):
        """The median over all steps but the first, which builds."""
        return median([n / s for n, s in zip(self.samples, self.seconds, strict=True)][1:] or [0.0])

    def save(self, folder):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        figures = asdict(self) | {
            "samples_per_second": self.samples_per_second,
            "first_step_seconds": self.seconds[0],
            "step_seconds": median(self.seconds[1:] or self.seconds),
        }
        (folder / f"{self.backend}.json").write_text(json.dumps(figures, indent=1))
        return figures


class Stopwatch:
    """with Stopwatch() as watch: ...; watch.seconds"""

    def __enter__(self):
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error):
        self.seconds = time.perf_counter() - self.start


def records_in(folder):
    """Of each backend that has been run."""
    return [json.loads((Path(folder) / f"{b}.json").read_text()) for b in BACKENDS if known(folder, b)]


def table(folder):
    """A row of Markdown for every record in the folder."""
    records = records_in(folder)
    rows = [
        f"| backend | {records[0]['measure']} | step, ms | samples/s | first step, s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        figures = f"{record['evaluations'][-1][1]:.3g} | {1e3 * record['step_seconds']:.0f}"
        speed = f"{record['samples_per_second']:.1f} | {record['first_step_seconds']:.1f}"
        rows.append(f"| {record['backend']} | {figures} | {speed} |")
    return "\n".join(rows)


def draw(folder, title):
    """One picture of every record in the folder: loss, evaluation, step times. Returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = records_in(folder)
    figure, (loss, quality, times) = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    for color, record in zip(("tab:blue", "tab:orange", "tab:green"), records, strict=False):
        label = record["backend"]
        loss.plot(record["losses"], color=color, alpha=0.25, linewidth=0.8)
        loss.plot(smooth(record["losses"]), color=color, label=label)
        quality.plot(*zip(*record["evaluations"], strict=True), color=color, marker="o", label=label)
        speed = f"{label}: {1e3 * record['step_seconds']:.0f} ms, {record['samples_per_second']:.1f} samples/s"
        times.plot([1e3 * s for s in record["seconds"][1:]], color=color, linewidth=0.9, label=speed)
    loss.set(title="training loss", xlabel="step")
    quality.set(title=records[0]["measure"], xlabel="step")
    times.set(title="time of a step (ms; median in the legend)", xlabel="step", ylim=(0, None))
    for axes in (loss, quality, times):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{title}\n{records[0]['machine']}", fontsize=11)
    path = Path(folder) / "training.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def known(folder, backend):
    return (Path(folder) / f"{backend}.json").exists()


def smooth(values, memory=0.9):
    """Exponential mean without the bias of its start."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = memory * total + (1 - memory) * value, memory * weight + (1 - memory)
        out.append(total / weight)
    return out


def perplexity(loss):
    return math.exp(min(loss, 50.0))
