"""Holds what the examples of many processes share: a language model of bytes, its text, a rank's training.

A module of these starts itself on several processes of this machine, over gloo, or over NCCL where there are GPUs::

    def train(args, place): ...      # what one rank measured

    if __name__ == "__main__":
        shared.main("examples.parallel.mine", __doc__, train)
"""

import argparse
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import distributed, nn

from examples import processes

WORDS = 256  # bytes
HEAD = 16  # numbers of a head of attention
CLIP = 1.0  # the most that the norm of all gradients is

# --- the model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal. ``spread``: of a rank that has a part of each row; makes (keys, values) of the whole row of its own ones.
    How many heads there are is read from the widths, of which tensor parallelism leaves each rank a part."""

    def __init__(self, width, spread=None, first=0):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.spread, self.first = spread, first

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.spread is None:
            y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = self.spread(key), self.spread(value)
            places = torch.arange(key.shape[2], device=x.device)
            seen = places <= (self.first + places[: query.shape[2]])[:, None]
            y = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, **attention):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, **attention)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.down(nn.functional.gelu(self.up(self.between(x)), approximate="tanh"))


class Embedding(nn.Module):
    """Of bytes and their places, the first of which is ``first``."""

    def __init__(self, width, length, first=0):
        super().__init__()
        self.words, self.places, self.first = nn.Embedding(WORDS, width), nn.Embedding(length, width), first

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device) + self.first)


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, x):
        return self.logits(self.norm(x))


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Model(nn.Module):
    """Its loss for ids and labels [rows, length]. ``attention``: as :class:`Attention` takes it."""

    def __init__(self, args, first=0, **attention):
        super().__init__()
        self.embedding = Embedding(args.width, args.length, first)
        self.layers = nn.ModuleList(Layer(args.width, first=first, **attention) for _ in range(args.layers))
        self.head = Head(args.width)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.head(x), labels)


def optimizer_of(module, args):
    """FusedAdam beside the engine, AdamW of PyTorch's beside PyTorch: the same update."""
    if args.backend == "ortmodule":
        from ortmodule.optim import AdamWMode, FusedAdam

        return FusedAdam(module.parameters(), lr=args.lr, weight_decay=0.01, adam_w_mode=AdamWMode.ADAMW_TORCH)
    return torch.optim.AdamW(module.parameters(), lr=args.lr)


# --- the text ---------------------------------------------------------------------------------------------------------


def read(path=None):
    """The bytes of a text [n]: of the King James Bible, or of a file; without both, of this project's license."""
    if path is None and shutil.which("bible"):
        from examples.pretrain_gpt.data import read_text

        text = read_text()
    else:
        text = Path(path or Path(__file__).parents[2] / "LICENSE").read_text()
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


class Batches:
    """Windows of the text, of which this rank has every ``parts``-th, from the ``part``-th on: all draw the same."""

    def __init__(self, args, device, part=0, parts=1):
        self.text, self.length, self.device = read(args.text), args.length, device
        self.rows, self.part, self.parts = args.batch_size * parts, part, parts

    def __call__(self, step):
        """(ids, labels) [batch size, length] of a step."""
        drawn = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(self.text) - self.length, (self.rows,), generator=drawn)[self.part :: self.parts]
        windows = torch.stack([self.text[i : i + self.length + 1] for i in starts.tolist()]).to(self.device)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# --- a rank -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    rank: int
    ranks: int
    device: torch.device


def wrapped(module, args):
    if args.backend == "ortmodule":
        from ortmodule import ORTModule

        return ORTModule(module)
    return module


def learn(args, batches, step_of):
    """What the steps of a rank measured. ``step_of(ids, labels)``: makes a step, and returns this rank's loss, or the
    mean of all."""
    losses, seconds = [], []
    for step in range(args.steps):
        ids, labels = batches(step)
        start = time.perf_counter()
        loss = float(step_of(ids, labels))
        seconds.append(time.perf_counter() - start)
        losses.append(loss)
    return {"losses": losses, "first": seconds[0], "step": median(seconds[1:] or seconds)}


def engine_of(*modules):
    """{"engine": the least share of the weights' products that the engine runs}, where these are wrapped."""
    from ortmodule import ORTModule, explain

    reports = [explain(module) for module in modules if isinstance(module, ORTModule)]
    shares = [report.weights_in_engine if report.captured else 0.0 for report in reports]
    return {"engine": min(shares) if shares else None}


def place():
    """Of this process, whose group there is."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    return Place(distributed.get_rank(), distributed.get_world_size(), device)


def _parser(document):
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("eager", "ortmodule"), default="ortmodule")
    parser.add_argument(
        "--text", type=Path, help="a file; without it the King James Bible, where bible-kjv is installed"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8, help="rows of each process, or of each that has its own")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    processes.add_arguments(parser)
    return parser


def arguments_of(given, document="", arguments=None):
    """What was given. ``arguments(parser)``: adds an example's own."""
    parser = _parser(document)
    if arguments is not None:
        arguments(parser)
    return parser.parse_args(given)


def main(module, document, train, arguments=None, given=None):
    """Starts ``module`` on several processes and prints a row for each; inside one of them: what ``train(args, place)``
    returns. ``arguments``: as of :func:`arguments_of`. Returns a dictionary for each rank."""
    given = sys.argv[1:] if given is None else given
    args = arguments_of(given, document, arguments)
    if "RANK" in os.environ:  # torchrun has started it
        processes.work(args, lambda rank: train(args, place()), gpus=True)
    found = processes.rows(module, given, args.processes, args.limit)
    print("| rank | first loss | last loss | step, s | first step, s | in the engine |")
    print(f"| --- | {'---: | ' * 5}".rstrip())
    for each in found:
        share = "–" if each["engine"] is None else f"{each['engine']:.0%}"
        losses = f"{each['losses'][0]:.3f} | {each['losses'][-1]:.3f}"
        print(f"| {each['rank']} | {losses} | {each['step']:.3f} | {each['first']:.2f} | {share} |")
    return found
