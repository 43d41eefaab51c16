"""The models that are measured and the batches they get; a row is a line in ROWS.

Attention and dropout are each model's defaults. batch(generator, variation): variation 0 is the size in the row's
name; 1 to 7 are sizes that a run has not seen (another length, or another batch size for images).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn

CLASSES = 42


@dataclass(frozen=True)
class Row:
    title: str
    build: Callable
    batch: Callable


def lengths(length):
    """The length of each variation: below the usual one, so that no more memory is needed, never the same."""
    return lambda variation: length - 3 * variation


def ids(generator, vocabulary, *shape):
    return torch.randint(3, vocabulary, shape, generator=generator)


def language(batch, length, vocabulary):
    """Labels everywhere."""

    def make(generator, variation=0):
        tokens = ids(generator, vocabulary, batch, lengths(length)(variation))
        return {"input_ids": tokens, "labels": tokens}

    return make


def masked(batch, length, vocabulary):
    """Labels on 15 % of the tokens, no padding."""

    def make(generator, variation=0):
        tokens = ids(generator, vocabulary, batch, lengths(length)(variation))
        hidden = torch.rand(tokens.shape, generator=generator) < 0.15
        return {
            "input_ids": tokens.masked_fill(hidden, 2),
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.masked_fill(~hidden, -100),
        }

    return make


def sentences(batch, length, vocabulary):
    """A class each; more than half of a batch is padding, as in the glosses of examples/finetune_text_classifier."""

    def make(generator, variation=0):
        width = lengths(length)(variation)
        tokens = ids(generator, vocabulary, batch, width)
        used = torch.randint(6, width * 4 // 5, (batch, 1), generator=generator)
        used[0] = width
        mask = (torch.arange(width) < used).long()
        labels = torch.randint(0, CLASSES, (batch,), generator=generator)
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}

    return make


def images(batch, side):
    def make(generator, variation=0):
        count = batch - variation
        return {
            "pixel_values": torch.randn(count, 3, side, side, generator=generator),
            "labels": torch.randint(0, CLASSES, (count,), generator=generator),
        }

    return make


class Translator(nn.Module):
    """nn.Transformer between an embedding and a classifier, with a causal mask."""

    def __init__(self, vocabulary=10_000, width=512, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 8, layers, layers, 2048, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, labels):
        length = labels.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=labels.device).triu(1)
        hidden = self.transformer(self.embed(input_ids), self.embed(labels), tgt_mask=causal)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def hf(head, config, **settings):
    """The class transformers.<head> with a configuration of settings."""

    def build():
        return getattr(transformers, head)(getattr(transformers, config)(**settings))

    return build


MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LLAMA = {"vocab_size": 24_000, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
LLAMA |= {"intermediate_size": 1376, "max_position_embeddings": 512}
VIT_SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
RESNET_18 = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}

ROWS = {
    "minilm": Row(
        "MiniLM classifier, 32×48",
        hf("BertForSequenceClassification", "BertConfig", num_labels=CLASSES, **MINILM),
        sentences(32, 48, 30_000),
    ),
    "bert-base": Row("BERT-base masked LM, 8×128", hf("BertForMaskedLM", "BertConfig"), masked(8, 128, 30_000)),
    "gpt2": Row("GPT-2 124M, 4×128", hf("GPT2LMHeadModel", "GPT2Config"), language(4, 128, 50_000)),
    "llama-50m": Row(
        "Llama-style 50M, 8×128", hf("LlamaForCausalLM", "LlamaConfig", **LLAMA), language(8, 128, 24_000)
    ),
    "vit-small": Row(
        "ViT-small, 8×224²",
        hf("ViTForImageClassification", "ViTConfig", num_labels=CLASSES, **VIT_SMALL),
        images(8, 224),
    ),
    "resnet-18": Row(
        "ResNet-18, 8×224²",
        hf("ResNetForImageClassification", "ResNetConfig", num_labels=CLASSES, **RESNET_18),
        images(8, 224),
    ),
    "transformer": Row("nn.Transformer 3+3×512, 16×64", Translator, language(16, 64, 10_000)),
}
