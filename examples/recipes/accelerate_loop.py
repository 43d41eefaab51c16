"""Trains a small GPT-2 on Python's reference in accelerate's plain loop.

python -m examples.recipes.accelerate_loop --backend ortmodule
"""

import itertools

import torch
from accelerate import Accelerator

from examples.recipes.shared import batches, language_model, paragraphs, parse, report, tokenizer, wrapped


def main(argv=None):
    settings = parse(argv)
    words = tokenizer(paragraphs())

    accelerator = Accelerator()
    own = wrapped(language_model(len(words)), settings)  # before prepare()
    optimizer = torch.optim.AdamW(own.parameters(), lr=settings.lr)
    model, optimizer, rows = accelerator.prepare(own, optimizer, batches(words, settings))
    found, epochs = [], itertools.chain.from_iterable(itertools.repeat(rows))
    for batch in itertools.islice(epochs, settings.steps):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return report("accelerate_loop", settings, accelerator.unwrap_model(model), found)


if __name__ == "__main__":
    main()
