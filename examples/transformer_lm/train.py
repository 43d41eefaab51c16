"""Trains PyTorch's nn.Transformer encoder as a language model of characters with ORTTrainer, and reports perplexity.

    python -m examples.transformer_lm.train --text book.txt --steps 400

Without --text it reads the King James Bible (Debian's package bible-kjv). Checkpoints go to --checkpoint every
--save-every steps; the same command goes on from there. With --onnx the trained model is saved for inference.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from examples.common import perplexity
from examples.pretrain_gpt.data import read_text
from ortmodule import ORTTrainer, ORTTrainerOptions
from ortmodule.optim import AdamConfig, lr_scheduler


class LanguageModel(nn.Module):
    """Characters [length, batch] to logits [length, batch, vocabulary]; each sees those before it."""

    def __init__(self, vocabulary, width, heads, layers, dropout, most=1024):
        super().__init__()
        self.width, self.embedding = width, nn.Embedding(vocabulary, width)
        angles = torch.arange(most)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).view(most, 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.dropout, self.decoder = nn.Dropout(dropout), nn.Linear(width, vocabulary)

    def forward(self, src):
        length = src.shape[0]
        mask = torch.ones(length, length, device=src.device).tril().log()  # 0 and -inf
        hidden = self.dropout(self.embedding(src) * math.sqrt(self.width) + self.positions[:length])
        return self.decoder(self.encoder(hidden, mask))


def load(text):
    """The characters of the text as numbers, those to train on and the last twentieth; how many kinds there are."""
    kinds = sorted(set(text))
    number = {kind: i for i, kind in enumerate(kinds)}
    numbers = torch.tensor([number[character] for character in text])
    cut = len(numbers) * 19 // 20
    return numbers[:cut], numbers[cut:], len(kinds)


def windows(numbers, batch, length, generator):
    """Characters [length, batch], and those that follow each, in one row."""
    starts = torch.randint(0, len(numbers) - length, (batch,), generator=generator)
    rows = torch.stack([numbers[i : i + length + 1] for i in starts.tolist()], 1)
    return rows[:-1], rows[1:].reshape(-1)


def loss_fn(logits, label):
    return nn.functional.cross_entropy(logits.flatten(0, 1), label)


def make_trainer(args, vocabulary):
    torch.manual_seed(args.seed)
    model = LanguageModel(vocabulary, args.width, args.heads, args.layers, args.dropout)
    description = {
        "inputs": [("src", ["length", "batch"]), ("label", ["targets"])],
        "outputs": [("loss", [], True), ("logits", ["length", "batch", vocabulary])],
    }
    options = ORTTrainerOptions(
        {
            "lr_scheduler": lr_scheduler.CosineWarmupLRScheduler(args.steps, warmup=0.1),
            "mixed_precision": {"enabled": args.mixed_precision},
        }
    )
    return ORTTrainer(model, description, AdamConfig(lr=args.lr, lambda_coef=0.01), loss_fn, options)


def train(args):
    text = args.text.read_text() if args.text else read_text()
    numbers, held_out, vocabulary = load(text)
    trainer = make_trainer(args, vocabulary)
    generator, losses = torch.Generator().manual_seed(args.seed), []
    if args.checkpoint and args.checkpoint.exists():
        generator.set_state(trainer.load_checkpoint(args.checkpoint)["generator"])
    begun = trainer.train_step_info.step
    for step in tqdm(range(begun + 1, args.steps + 1), initial=begun, total=args.steps, unit="step"):
        loss, _ = trainer.train_step(*windows(numbers, args.batch_size, args.length, generator))
        losses.append(float(loss))
        if args.checkpoint and (step % args.save_every == 0 or step == args.steps):
            trainer.save_checkpoint(args.checkpoint, {"generator": generator.get_state()})
    generator = torch.Generator().manual_seed(0)
    unseen = [windows(held_out, args.batch_size, args.length, generator) for _ in range(args.evaluate)]
    return trainer, losses, perplexity(sum(float(trainer.eval_step(*batch)[0]) for batch in unseen) / len(unseen))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--evaluate", type=int, default=8, help="batches of the held-out text")
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--onnx", type=Path)
    args = parser.parse_args(arguments)
    trainer, losses, unseen = train(args)
    print(f"perplexity of a character {unseen:.2f} after {trainer.train_step_info.step} steps")
    if args.onnx:
        trainer.save_as_onnx(args.onnx)
        print(f"saved as {args.onnx}")
    return losses


if __name__ == "__main__":
    main()
