"""Trains TwinBERT: two towers of one encoder and a layer across learn which verse follows another.

    python -m examples.twinbert.train                                all four settings, two processes each: a table
    python -m examples.twinbert.train --settings deepspeed-ortmodule --steps 200 --text book.txt

The settings are PyTorch's DistributedDataParallel and DeepSpeed, each with the model as it is and with ORTModule and
FusedAdam, DeepSpeed then also with FP16_Optimizer. Each is trained from the same weights on the same batches; the table
has the median step and what the memory of a process grew by from before its first step to its peak (activations,
gradients, the states of the optimizer). Without --text the King James Bible is read (Debian's package bible-kjv).
"""

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from transformers import BertConfig, BertModel

from examples import processes
from examples.pretrain_gpt.data import read_text
from ortmodule import Config, ORTModule, explain
from ortmodule.optim import AdamWMode, FP16_Optimizer, FusedAdam

SETTINGS = ("pytorch", "ortmodule", "deepspeed", "deepspeed-ortmodule")
WORDS, PADDING, FIRST = 8192, 0, 1  # numbers of words; that of padding, and that of a row's beginning


class TwinBert(nn.Module):
    """``forward(query, keyword, label)``: rows of words, [batch, length] each, and 1.0 where they belong together,
    [batch]. Returns the loss."""

    def __init__(self, config):
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        width = config.hidden_size
        self.cross, self.score = nn.Linear(width, width), nn.Linear(width, 1)

    def vector(self, words):
        """The mean of a row's hidden states, padding aside."""
        mask = words != PADDING
        hidden = self.encoder(input_ids=words, attention_mask=mask.long()).last_hidden_state
        weights = mask.to(hidden.dtype)[:, :, None]
        return (hidden * weights).sum(1) / weights.sum(1)

    def forward(self, query, keyword, label):
        joined = torch.maximum(self.vector(query), self.vector(keyword))
        crossed = joined + torch.relu(self.cross(joined))
        return nn.functional.binary_cross_entropy_with_logits(self.score(crossed)[:, 0].float(), label)


def rows_of(text, length):
    """Lines of a text as rows of numbers of words, [lines, length]."""
    lines = [line.split() for line in text.splitlines() if len(line.split()) > 3]
    numbers = {}
    rows = torch.full((len(lines), length), PADDING)
    for i, words in enumerate(lines):
        row = [FIRST] + [numbers.setdefault(word, 2 + len(numbers) % (WORDS - 2)) for word in words[: length - 1]]
        rows[i, : len(row)] = torch.tensor(row)
    return rows


def batch(rows, size, generator):
    """A half of the pairs are a line and the next one, the others a line and any."""
    first = [generator.randrange(len(rows) - 1) for _ in range(size)]
    label = [i % 2 for i in range(size)]
    second = [i + 1 if same else generator.randrange(len(rows)) for i, same in zip(first, label, strict=True)]
    return rows[first], rows[second], torch.tensor(label, dtype=torch.float32)


def memory(kind):
    """Bytes of this process: VmRSS, now, or VmHWM, at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


def data_parallel(model, args):
    """(what computes the loss, what makes a step of it)."""
    ours = isinstance(model, ORTModule)
    if ours:
        optimizer = FusedAdam(model.parameters(), lr=args.lr, adam_w_mode=AdamWMode.ADAMW_TORCH)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    module = nn.parallel.DistributedDataParallel(model)

    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, step


def deepspeed(model, args):
    """The same with ZeRO."""
    from examples.parallel.deepspeed_zero import set_up

    config = {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 1.0,
    }
    if args.dtype != "float32":
        config["bf16" if args.dtype == "bfloat16" else "fp16"] = {"enabled": True}
    if ours := isinstance(model, ORTModule):
        optimizer = FusedAdam(model.parameters(), lr=args.lr, adam_w_mode=AdamWMode.ADAMW_TORCH)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    engine, optimizer, _, _ = set_up().initialize(model=model, optimizer=optimizer, config=config)
    if ours:
        FP16_Optimizer(optimizer)

    def step(loss):
        engine.backward(loss)
        engine.step()

    return engine, step


def train(rank, args):
    """What one process of one setting measured."""
    rows = rows_of(args.text.read_text() if args.text else read_text(), args.length)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=args.width, num_hidden_layers=args.layers, max_position_embeddings=args.length,
        num_attention_heads=max(1, args.width // 64), intermediate_size=4 * args.width,
    )  # fmt: skip
    model = TwinBert(config).train()
    if args.setting.endswith("ortmodule"):
        model = ORTModule(model, config=Config(keep_memory=args.keep_memory))
    module, step = (deepspeed if args.setting.startswith("deepspeed") else data_parallel)(model, args)
    generator, losses, seconds, before = random.Random(rank), [], [], memory("VmRSS")
    for _ in range(args.steps):
        pairs = batch(rows, args.batch_size, generator)
        start = time.perf_counter()
        loss = module(*pairs)
        step(loss)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    report = explain(model) if isinstance(model, ORTModule) else None
    return {
        "losses": losses, "first": seconds[0], "step": median(seconds[1:] or seconds),
        "bytes": memory("VmHWM") - before, "fallback": report.fallback if report is not None else None,
    }  # fmt: skip


def main(given=None):
    given = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--setting", choices=SETTINGS, help=argparse.SUPPRESS)
    processes.add_arguments(parser)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="of each process")
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--stage", type=int, choices=range(3), default=1, help="of ZeRO")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="with DeepSpeed")
    parser.add_argument(
        "--keep-memory", action="store_true",
        help="with ORTModule, that of a step for the next one: steps are shorter, the optimizer's adds up with it",
    )  # fmt: skip
    args = parser.parse_args(given)
    if args.worker:
        processes.work(args, lambda rank: train(rank, args))
    print(f"| setting | step, s | first step, s | memory, MB | last loss |\n| --- | {'---: | ' * 4}".rstrip())
    every = {}
    for setting in args.settings:
        own = ["--worker", "--setting", setting, *given]
        found = processes.rows("examples.twinbert.train", own, args.processes, args.limit, DS_ACCELERATOR="cpu")
        every[setting] = found
        loss = sum(each["losses"][-1] for each in found) / len(found)
        step, first, most = (max(each[name] for each in found) for name in ("step", "first", "bytes"))
        print(f"| {setting} | {step:.3f} | {first:.2f} | {most / 1e6:.0f} | {loss:.3f} |", flush=True)
    return every


if __name__ == "__main__":
    main()
