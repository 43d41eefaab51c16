"""Trains some hundred steps in PyTorch and ORTModule, for a few seeds, and compares where the loss ends.

    python -m benchmarks.losses --rows gpt2 bert-base --autocast bfloat16
    python -m benchmarks.losses --rows all --steps 300 --seeds 1 2 3 --columns eager compile ortmodule

Every run starts from the same weights and learns the same few batches again and again, with AdamW and a learning rate
that rises over the first tenth of the steps and falls to 0 at their end. A run's figure is the mean loss of its latest
steps, dropout included; what the seeds of one column differ by is what two columns may differ by. Written to <out>.json
and <out>.md after each run.
"""

import argparse
from pathlib import Path
from statistics import mean

import torch
import transformers

from benchmarks.columns import COLUMNS, trainee_of
from benchmarks.report import machine, write
from benchmarks.rows import EVERY, MORE, ROWS

BATCHES, LATEST, EVERY_SO_MANY = 8, 10, 25


def losses_of(key, column, model, args, steps, seed=1, samples=None):
    """The loss at each of so many steps of a fresh copy of ``model``; of the first ``samples`` of each batch."""
    row, generator = EVERY[key], torch.Generator().manual_seed(1)
    batches = [{name: of[:samples] for name, of in row.batch(generator).items()} for _ in range(BATCHES)]
    trainee, losses = trainee_of(column, key, model, args), []
    trainee.plan(steps)
    torch.manual_seed(seed)
    for i in range(steps):
        trainee.step(batches[i % BATCHES])
        losses.append(trainee.loss)
    trainee.close()
    return losses


def end_of(losses):
    """The mean of the latest."""
    return mean(losses[-LATEST:])


def last_loss(key, column, model, args, steps):
    """The mean loss of the latest of so many steps."""
    return end_of(losses_of(key, column, model, args, steps))


def markdown(report):
    """A table: the figures of each seed, a row for every model and column."""
    about = report["machine"]
    lines = [
        f"{about['cpu']}; torch {about['torch']}, autocast {report['autocast']}, {report['steps']} steps"
        + (f", {report['samples']} samples of each batch" if report["samples"] else ""),
        "",
        "| model | first loss | " + " | ".join(report["columns"]) + " |",
        "| --- | ---: |" + " ---: |" * len(report["columns"]),
    ]
    for name, columns in report["rows"].items():
        runs = [run for found in columns.values() for run in found.values()]
        cells = [EVERY[name].title, f"{runs[0]['curve'][0]:.3f}"]
        for column in report["columns"]:
            cells.append(", ".join(f"{run['last']:.4f}" for run in columns.get(column, {}).values()) or "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*EVERY, "all"], default=list(ROWS))
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=["eager", "ortmodule"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="of what dropout draws")
    parser.add_argument("--samples", type=int, help="of each batch, for machines on which whole ones take hours")
    parser.add_argument("--autocast", type=lambda name: getattr(torch, name), help="bfloat16, float16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ort-python", help="the Python of an environment with onnxruntime-training")
    parser.add_argument("--out", default="results/losses")
    args = parser.parse_args()
    args.rows = [*ROWS, *MORE] if "all" in args.rows else args.rows
    transformers.utils.logging.set_verbosity_error()

    report = {"machine": machine(args.device), "autocast": str(args.autocast), "steps": args.steps}
    report |= {"samples": args.samples, "columns": args.columns, "rows": {}}
    for name in args.rows:
        torch.manual_seed(0)
        model = EVERY[name].build().train()
        columns = report["rows"][name] = {}
        for seed in args.seeds:
            for column in args.columns:
                losses = losses_of(name, column, model, args, args.steps, seed, args.samples)
                run = {"last": end_of(losses), "curve": losses[::EVERY_SO_MANY] + losses[-1:]}
                columns.setdefault(column, {})[seed] = run
                print(
                    name, column, seed, *(f"{loss:.3f}" for loss in run["curve"]), f"-> {run['last']:.4f}", flush=True
                )
                write(report, markdown(report), Path(args.out))
    print(markdown(report))


if __name__ == "__main__":
    main()
