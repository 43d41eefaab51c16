"""Steps of ORTTrainer (`train_step`) against ORTModule and FusedAdam in a loop: the same batches, the same weights.

    python -m benchmarks.trainer                  a transformer language model, 16 rows of 128 characters
    python -m benchmarks.trainer --width 64 --layers 1 --steps 5

Both take turns in one process; times are medians, the spread is the middle half. The losses are the same.
"""

import argparse
import copy
from pathlib import Path

import torch

from benchmarks.optimizer import seconds
from benchmarks.report import machine, middle, milliseconds, speedup, write
from examples.transformer_lm.train import LanguageModel, loss_fn
from ortmodule import ModuleWithLoss, ORTModule, ORTTrainer
from ortmodule.optim import AdamConfig, AdamWMode, FusedAdam

VOCABULARY, LR = 96, 1e-4


def batches(count, length, rows):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        numbers = torch.randint(0, VOCABULARY, (length + 1, rows), generator=generator)
        yield numbers[:-1], numbers[1:].reshape(-1)


def loop(model):
    """A step of ORTModule and FusedAdam, which returns the loss."""
    ours = ORTModule(ModuleWithLoss(model, loss_fn))
    optimizer = FusedAdam(model.parameters(), lr=LR, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH, weight_decay=0.0)

    def step(x, label):
        loss = ours(x, labels=label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def trainer(model):
    """The same as one call."""
    description = {
        "inputs": [("src", ["length", "batch"]), ("label", ["targets"])],
        "outputs": [("loss", [], True)],
    }
    config = AdamConfig(lr=LR, lambda_coef=0.0, epsilon=1e-8, max_norm_clip=None)
    return ORTTrainer(model, description, config, loss_fn).train_step


WAYS = {"ORTModule + FusedAdam": loop, "train_step": trainer}


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 256), ("heads", 4), ("layers", 4), ("rows", 16), ("length", 128), ("steps", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args(given)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, args.width, args.heads, args.layers, 0.0)
    steps = {name: way(copy.deepcopy(model)) for name, way in WAYS.items()}
    times, losses = {name: [] for name in WAYS}, {name: [] for name in WAYS}
    for i, batch in enumerate(batches(args.warmup + args.steps, args.length, args.rows)):
        for name in list(WAYS)[:: 1 if i % 2 else -1]:  # each goes first as often
            took = seconds(lambda name=name, batch=batch: losses[name].append(steps[name](*batch)))
            if i >= args.warmup:
                times[name].append(took)
    first, *_ = times.values()
    rows = {
        name: {"step": middle(t), "speedup": speedup(first, t), "losses": [loss.item() for loss in losses[name]]}
        for name, t in times.items()
    }
    report = {"machine": machine(), "settings": {k: v for k, v in vars(args).items() if k != "out"}, "rows": rows}
    lines = ["| | step, ms | speed | last loss |", "| --- | ---: | ---: | ---: |"]
    for name, row in rows.items():
        speed = "{median:.2f}× ({low:.2f}–{high:.2f})".format(**row["speedup"])
        lines.append(f"| {name} | {milliseconds(row['step'])} | {speed} | {row['losses'][-1]:.5f} |")
    table = "\n".join(lines) + "\n"
    print(table)
    if args.out:
        write(report, table, args.out)
    return report


if __name__ == "__main__":
    main()
