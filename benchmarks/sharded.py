"""Measures training steps of GPT-2 on several processes: FSDP2 and DistributedDataParallel, with ORTModule and without.

    python -m benchmarks.sharded                        GPT-2 of 124 M weights, two processes of one thread
    python -m benchmarks.sharded --layers 2 --width 64 --steps 3

With ORTModule and without take turns in the same processes; times are medians of the first process, the spread is the
middle half. The weights are random, and so is the text; the losses are the same. "in the engine" is what `explain` says
of the weights that are computed with there.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.optimizer import seconds
from benchmarks.report import machine, middle, milliseconds, speedup, write
from examples import processes
from ortmodule import ORTModule, explain
from ortmodule.optim import AdamWMode, FusedAdam

WRAPPERS, LR = ("FSDP2", "DDP"), 1e-4
VOCABULARY = 50257


def model_of(args):
    import transformers

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=args.width, n_layer=args.layers, n_head=max(1, args.width // 64),
        n_positions=max(args.length, 64), use_cache=False, **rates,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def trained(wrapper, ours, args):
    """(the module that `explain` knows, what makes a step of a batch and returns the loss)."""
    model = module = model_of(args)
    if wrapper == "FSDP2":
        mesh = init_device_mesh("cpu", (args.processes,))
        for layer in model.transformer.h:
            fully_shard(layer, mesh=mesh)
        model = module = fully_shard(model, mesh=mesh)
    if ours:
        model = module = ORTModule(model)
    if wrapper == "DDP":
        module = nn.parallel.DistributedDataParallel(model)
    if ours:
        optimizer = FusedAdam(model.parameters(), lr=LR, eps=1e-8, adam_w_mode=AdamWMode.ADAMW_TORCH)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(ids):
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


def measured(wrapper, rank, args):
    """{with and without the engine: times, losses, the part of the weights in the engine}, of this process."""
    made = {ours: trained(wrapper, ours, args) for ours in (False, True)}
    found = {ours: {"times": [], "losses": []} for ours in made}
    for i in range(args.warmup + args.steps):
        generator = torch.Generator().manual_seed(1000 * i + rank)
        ids = torch.randint(0, VOCABULARY, (args.rows, args.length), generator=generator)
        for ours in (False, True) if i % 2 else (True, False):  # each goes first as often
            distributed.barrier()
            step, row = made[ours][1], found[ours]
            took = seconds(lambda step=step, row=row, ids=ids: row["losses"].append(step(ids)))
            if i >= args.warmup:
                row["times"].append(took)
    for row in found.values():
        row["losses"] = [loss.item() for loss in row["losses"]]
    found[True]["engine"] = explain(made[True][0]).weights_in_engine
    return {f"{wrapper} + ORTModule" if ours else wrapper: row for ours, row in found.items()}


def rows_of(rank, args):
    """{wrapper, with the engine or without: what this process measured}."""
    rows = {}
    for wrapper in args.wrappers:
        rows |= measured(wrapper, rank, args)
    return {"rows": rows}


def main(given=None):
    given = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 768), ("layers", 12), ("rows", 4), ("length", 128), ("steps", 12), ("warmup", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--wrappers", nargs="+", choices=WRAPPERS, default=WRAPPERS)
    parser.add_argument("--dropout", type=float, default=0.0)
    processes.add_arguments(parser)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    args = parser.parse_args(given)
    if args.worker:
        processes.work(args, lambda rank: rows_of(rank, args))
    rows = processes.rows("benchmarks.sharded", ["--worker", *given], args.processes, args.limit)[0]["rows"]
    lines = ["| | step, ms | speed | in the engine, % | last loss |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, row in rows.items():
        plain = rows[name.removesuffix(" + ORTModule")]
        row |= {"step": middle(row["times"]), "speedup": speedup(plain["times"], row["times"])}
        speed = "{median:.2f}× ({low:.2f}–{high:.2f})".format(**row["speedup"])
        engine = f"{100 * row['engine']:.1f}" if "engine" in row else "–"
        lines.append(f"| {name} | {milliseconds(row['step'])} | {speed} | {engine} | {row['losses'][-1]:.5f} |")
    table = "\n".join(lines) + "\n"
    print(table)
    report = {"machine": machine(), "settings": {k: v for k, v in vars(args).items() if k != "out"}, "rows": rows}
    if args.out:
        write(report, table, args.out)
    return report


if __name__ == "__main__":
    main()
