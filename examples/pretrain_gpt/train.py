"""Trains a small GPT-2 from scratch on the King James Bible and reports the perplexity of its last chapters.

    python -m examples.pretrain_gpt.train --backend ortmodule

As in the other example, one line wraps the model and everything else is the same for every backend. Figures go to
<out>/<backend>.json, the picture of all backends run so far to <out>/training.png.
"""

import argparse

import torch
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from examples.common import BACKENDS, Record, Stopwatch, draw, perplexity, with_backend
from examples.pretrain_gpt.data import load


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
    text, held_out, tokenizer = load(args.vocabulary)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="ortmodule")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="results/pretrain_gpt")
    args = parser.parse_args()

    model, record = train(args)
    figures = record.save(args.out)
    if args.backend == "ortmodule":
        from ortmodule import explain

        print(explain(model))
    print(
        f"{args.backend}: perplexity {record.evaluations[-1][1]:.1f} after {args.steps} steps, "
        f"{figures['samples_per_second']:.1f} samples/s, first step {figures['first_step_seconds']:.2f} s"
    )
    print(f"picture: {draw(args.out, 'a GPT-2 learns the King James Bible')}")


if __name__ == "__main__":
    main()
