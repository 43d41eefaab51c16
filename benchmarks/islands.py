"""Measures what submodules that PyTorch runs cost: a small BERT with two hooks and two islands.

    python benchmarks/islands.py [--batch 8] [--length 128] [--steps 20]

An island decides by a value in its forward; a hook keeps the activation, and the loss uses it. Rows:

    none     no hooks, no islands
    parts    on the attention's outputs of all four layers: about a tenth of the work
    halves   on one whole layer each, of eight
    layers   on the four whole layers: all of the work but the embeddings, which PyTorch runs as a whole

Printed are steps per second, forward and backward, of PyTorch and of ORTModule, measured in turns (the best of each),
their ratio, and what `explain()` says.
"""

import argparse
import logging
import time
import warnings

import torch
import transformers
from torch import nn

from ortmodule import Config, ORTModule, explain

KEPT = []


class Island(nn.Module):
    """A submodule in which Python reads a value."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        result = self.inner(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        if first[0, 0].sum().item() != first[0, 0].sum().item():
            raise ValueError("the activations are not numbers")
        return result


def keep(module, inputs, output):
    KEPT.append(output[0] if isinstance(output, tuple) else output)


def bert(row):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=512, num_hidden_layers=8 if row == "halves" else 4, num_attention_heads=8, intermediate_size=2048
    )
    model = transformers.BertForMaskedLM(config).train()
    layers = model.bert.encoder.layer
    if row == "none":
        return model
    for i, layer in enumerate(layers[:4]):
        if row == "parts":
            if i < 2:
                layer.attention.output.register_forward_hook(keep)
            else:
                layer.attention.output = Island(layer.attention.output)
        elif i < 2:
            layer.register_forward_hook(keep)
        else:
            layers[i] = Island(layer)
    return model


def batch(size, length):
    ids = torch.randint(5, 30000, (size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def step(model, inputs):
    KEPT.clear()
    loss = model(**inputs).loss + sum(h.square().mean() for h in KEPT)
    loss.backward()
    model.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--batch", 8), ("--length", 128), ("--steps", 20)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args()
    logging.getLogger("ortmodule").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    inputs = batch(given.batch, given.length)
    for row in ("none", "parts", "halves", "layers"):
        # The figure is of what runs after the captures: none of them waits for others to pay.
        models = bert(row), ORTModule(bert(row), config=Config(capture_share=float("inf")))
        for model in models:
            for _ in range(3):
                step(model, inputs)
        best = [float("inf"), float("inf")]
        for _ in range(given.steps):
            for i, model in enumerate(models):
                start = time.perf_counter()
                step(model, inputs)
                best[i] = min(best[i], time.perf_counter() - start)
        report = explain(models[1])
        said = f"breaks: {', '.join(report.breaks) or 'none'}" if report.captured else f"PyTorch: {report.fallback}"
        print(f"{row:7} PyTorch {1 / best[0]:6.2f}/s  ORTModule {1 / best[1]:6.2f}/s  {best[0] / best[1]:.2f}x  {said}")


if __name__ == "__main__":
    main()
