"""Pre-trains BERT with ORTTrainer: masked tokens and next sentences, LAMB, in two phases as BERT-large had it.

    python -m examples.pretrain_bert.train --size tiny --text book.txt

The first phase has sequences of 128 tokens, the second of 512. Without --text it reads the King James Bible (Debian's
package bible-kjv). With torchrun each process takes its part of a batch:

    torchrun --nproc-per-node 2 -m examples.pretrain_bert.train --size tiny
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import BertConfig, BertForPreTraining

from examples.pretrain_bert.data import Pairs, load
from examples.pretrain_gpt.data import read_text
from ortmodule import ORTTrainer, ORTTrainerOptions
from ortmodule.optim import LambConfig, lr_scheduler

#: (width, layers, heads)
SIZES = {"tiny": (64, 2, 2), "small": (256, 4, 4), "base": (768, 12, 12), "large": (1024, 24, 16)}


@dataclass
class Phase:
    """``rate``: for batches of ``batch`` sequences; that of others goes with the square root of theirs."""

    length: int
    rate: float
    batch: int
    warmup: float
    steps: float  # of all


PHASES = [Phase(128, 6e-3, 65536, 0.2843, 0.9), Phase(512, 4e-3, 32768, 0.128, 0.1)]
NAMES = ("input_ids", "attention_mask", "token_type_ids", "labels")
DESCRIPTION = {
    "inputs": [*((name, ["batch", "length"]) for name in NAMES), ("next_sentence_label", ["batch"])],
    "outputs": [("loss", [], True)],
}


def make_trainer(args, model, phase, steps, world, rank):
    plain = [name for name, p in model.named_parameters() if p.dim() < 2]  # biases and norms do not decay
    sequences = args.batch_size * args.accumulate * world
    rate = args.lr or phase.rate * (sequences / phase.batch) ** 0.5
    config = LambConfig([{"params": plain, "lambda_coef": 0.0}], lr=rate, lambda_coef=0.01)
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": args.accumulate},
            "lr_scheduler": lr_scheduler.PolyWarmupLRScheduler(steps, 0.0, 0.5, phase.warmup),
            "mixed_precision": {"enabled": args.mixed_precision},
            "distributed": {"world_size": world, "world_rank": rank, "allreduce_post_accumulation": True},
            "graph_transformer": {"transformer_layer_recompute": args.recompute},
        }
    )
    return ORTTrainer(model, DESCRIPTION, config, options=options)


def run_phase(args, model, data, phase, number, world, rank):
    """Losses of the phase's calls."""
    steps = max(1, round(args.steps * phase.steps))
    trainer = make_trainer(args, model, phase, steps, world, rank)
    sampler = DistributedSampler(data, world, rank, seed=args.seed)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    losses, bar = [], tqdm(total=steps, desc=f"phase {number}", unit="step", disable=rank != 0)
    epoch = 0
    while trainer.train_step_info.optimization_step < steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            losses.append(float(trainer.train_step(**batch)))
            bar.update(trainer.train_step_info.optimization_step - bar.n)
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            if trainer.train_step_info.optimization_step == steps:
                break
        epoch += 1
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint, {"phase": number})
    return losses


def train(args):
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(args.seed)
    sentences, tokenizer = load(args.text.read_text() if args.text else read_text(), args.vocabulary)
    width, layers, heads = SIZES[args.size]
    lengths = [args.length or phase.length for phase in PHASES]
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=max(lengths),
    )  # fmt: skip
    model, losses = BertForPreTraining(config).train(), []
    for number, (phase, length) in enumerate(zip(PHASES, lengths, strict=True), 1):
        data = Pairs(sentences, tokenizer, length, args.seed)
        losses.append(run_phase(args, model, data, phase, number, world, rank))
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="updates of both phases")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of one call in one process")
    parser.add_argument("--accumulate", type=int, default=2, help="calls of one update")
    parser.add_argument("--length", type=int, help="instead of 128 and 512")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--lr", type=float, help="instead of that of the recipe, scaled to the batch")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="layers are computed again in backward")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    losses = train(parser.parse_args(arguments))
    for number, of_phase in enumerate(losses, 1):
        print(f"phase {number}: loss {of_phase[0]:.3f} at first, {of_phase[-1]:.3f} at last")
    return losses


if __name__ == "__main__":
    main()
