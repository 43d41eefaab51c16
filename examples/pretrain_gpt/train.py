"""Trains a small GPT-2 from scratch on the King James Bible and reports the perplexity of its last chapters.

    python -m examples.pretrain_gpt.train --backend ortmodule

As in the other example, one line wraps the model and everything else is the same for every backend. Figures go to
<out>/<backend>.json, the picture of all backends run so far to <out>/training.png, and a table of them is printed.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from examples.common import BACKENDS, Record, Stopwatch, draw, parse, perplexity, setting, table, with_backend
from examples.pretrain_gpt.data import load


@dataclass
class Settings:
    """Of a training."""

    backend: str = setting("ortmodule", "who runs the model", choices=list(BACKENDS))
    text: str = setting("", "a file; without it the King James Bible, from Debian's package bible-kjv")
    steps: int = setting(400, "optimizer steps")
    batch_size: int = setting(16, "rows of a step")
    length: int = setting(128, "tokens of a row")
    width: int = setting(256, "of the model; a head has 32")
    layers: int = setting(4, "of the model")
    vocabulary: int = setting(2048, "different tokens")
    lr: float = setting(1e-3, "the highest learning rate")
    eval_every: int = setting(50, "steps from one evaluation to the next")
    seed: int = setting(0, "of weights, order and dropout")
    out: str = setting("results/pretrain_gpt", "folder for figures and the picture")


def random_windows(tokens, batch, length, generator):
    starts = torch.randint(0, len(tokens) - length, (batch,), generator=generator)
    return torch.stack([tokens[i : i + length] for i in starts.tolist()])


@torch.no_grad()
def evaluate(model, tokens, batch, length, most=64):
    """Perplexity over the first windows of the text."""
    model.eval()
    windows = tokens[: len(tokens) // length * length].view(-1, length)[:most]
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in windows.split(batch)]
    model.train()
    return perplexity(sum(losses) / len(losses))


def train(args):
    torch.manual_seed(args.seed)
    text, held_out, tokenizer = load(args.vocabulary, text=args.text)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 32,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)

    model = with_backend(model.train(), args.backend)  # model = ORTModule(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    record = Record(args.backend, "perplexity")
    bar = tqdm(range(1, args.steps + 1), desc=f"{args.backend:9}", unit="step")
    for step in bar:
        ids = random_windows(text, args.batch_size, args.length, generator)
        with Stopwatch() as watch:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        record.step(loss.item(), watch.seconds, args.batch_size)
        if step % args.eval_every == 0 or step == args.steps:
            record.evaluations.append((step, evaluate(model, held_out, args.batch_size, args.length)))
        shown = {"loss": f"{record.losses[-1]:.3f}", "samples/s": f"{record.samples_per_second:.1f}"}
        if record.evaluations:
            shown["perplexity"] = f"{record.evaluations[-1][1]:.1f}"
        bar.set_postfix(shown)
    return model, record


def main(argv=None):
    args = parse(Settings, argv, __doc__)
    model, record = train(args)
    figures = record.save(args.out)
    if args.backend == "ortmodule":
        from ortmodule import explain

        print(explain(model))
    print(
        f"{args.backend}: perplexity {record.evaluations[-1][1]:.1f} after {args.steps} steps, "
        f"{figures['samples_per_second']:.1f} samples/s, first step {figures['first_step_seconds']:.2f} s"
    )
    print(table(args.out))
    print(f"picture: {draw(args.out, 'a GPT-2 learns the King James Bible')}")
    return model, record


if __name__ == "__main__":
    main()
