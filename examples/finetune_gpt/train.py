"""Fine-tunes a GPT-2 with ORTTrainer, and reports the perplexity of an unseen text before and after.

    python -m examples.finetune_gpt.train --weights folder           as `save_pretrained` wrote it, with its tokenizer
    python -m examples.finetune_gpt.train                            a small GPT-2, trained here on the Old Testament
    torchrun --nproc-per-node 2 -m examples.finetune_gpt.train --pipeline 2 --micro-batches 4

The text is the end of the King James Bible, its last quarter (Debian's package bible-kjv), or a file; its last fifth is
held out. On several processes, stages of a pipeline have parts of the model, and other processes other rows.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from tqdm import tqdm
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from examples.common import perplexity
from examples.pretrain_gpt.data import load, read_text
from examples.pretrain_gpt.train import random_windows
from ortmodule import ORTTrainer, ORTTrainerOptions
from ortmodule.optim import AdamConfig, lr_scheduler

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def loss_fn(found, labels):
    """Of each token from those before it."""
    return nn.functional.cross_entropy(found["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_trainer(model, args, steps, lr, processes):
    tokens = ("batch", "length")
    description = {"inputs": [("input_ids", tokens), ("labels", tokens)], "outputs": [("loss", [], True)]}
    biases = [name for name, p in model.named_parameters() if p.dim() < 2]
    config = AdamConfig([{"params": biases, "lambda_coef": 0.0}], lr=lr, lambda_coef=0.01)
    options = {
        "lr_scheduler": lr_scheduler.LinearWarmupLRScheduler(steps, warmup=0.1),
        "mixed_precision": {"enabled": args.mixed_precision},
    }
    if processes > 1:
        options["distributed"] = {
            "world_size": processes,
            "world_rank": RANK,
            "pipeline_parallel_size": args.pipeline,
            "num_pipeline_micro_batches": args.micro_batches,
        }
    return ORTTrainer(model, description, config, loss_fn, ORTTrainerOptions(options))


def evaluate(trainer, tokens, args):
    rows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    batches = rows[: args.evaluate * args.batch_size].split(args.batch_size)
    batches = [batch for batch in batches if len(batch) == args.batch_size]
    return perplexity(sum(float(trainer.eval_step(batch, batch)) for batch in batches) / len(batches))


def learn(trainer, tokens, steps, args, text):
    """The losses of the steps. Processes that have parts of one model are given the same rows."""
    generator = torch.Generator().manual_seed(args.seed + trainer.data_parallel_rank)
    losses = []
    for _ in tqdm(range(steps), desc=text, unit="step", disable=RANK > 0):
        batch = random_windows(tokens, args.batch_size, args.length, generator)
        losses.append(float(trainer.train_step(batch, batch)))
    return losses


def own_base(args, text):
    """A GPT-2 that has learnt the first three quarters of the text, and the tokens of the rest."""
    before, after, tokenizer = load(args.vocabulary, held_out=0.25, text=text)
    heads = max(args.width // 32, 1)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=args.length, n_embd=args.width, n_layer=args.layers,
        n_head=heads, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    learn(make_trainer(model, args, args.base_steps, 1e-3, 1), before, args.base_steps, args, "base")
    return model, after


def given_base(args, text):
    """The model and the tokens of the last quarter of the text, by the tokenizer beside the weights."""
    text = Path(text).read_text(encoding="utf-8") if text else read_text()
    model = GPT2LMHeadModel.from_pretrained(args.weights, use_cache=False)
    ids = AutoTokenizer.from_pretrained(args.weights)(text[len(text) * 3 // 4 :])["input_ids"]
    return model, torch.tensor(ids)


def train(args):
    torch.manual_seed(args.seed)
    model, tokens = (given_base if args.weights else own_base)(args, args.text)
    cut = len(tokens) * 4 // 5
    learnt, held_out = tokens[:cut], tokens[cut:]
    if RANKS > 1:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    trainer = make_trainer(model, args, args.steps, args.lr, RANKS)
    before = evaluate(trainer, held_out, args)
    losses = learn(trainer, learnt, args.steps, args, "fine-tuning")
    after = evaluate(trainer, held_out, args)
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint)
    return {"losses": losses, "before": before, "after": after}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a folder of `save_pretrained`")
    parser.add_argument("--text", default="", help="a file")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--base-steps", type=int, default=300, help="of the model that is trained here")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--evaluate", type=int, default=16, help="batches of the held-out text")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--pipeline", type=int, default=1, help="processes that have stages of one model")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args(arguments)
    found = train(args)
    if RANK == 0:
        print(
            f"perplexity of the unseen text {found['before']:.1f} before, {found['after']:.1f} after {args.steps} steps"
        )
    if RANKS > 1:
        distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
