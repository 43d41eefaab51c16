"""Architectures, built small from their configurations: one line each.

An entry is a function that builds the module and a function that makes a batch: batch(module, size, generator) gives
the keyword arguments of forward, the labels among them, and differs in every variable dimension from size to size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn

VOCABULARY, CLASSES = 99, 5
NAMES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": CLASSES}
SMALL = NAMES | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SHAPES = ((2, 11), (3, 17), (4, 8))  # batch and length of the batches a model is compared on


@dataclass(frozen=True)
class Architecture:
    build: Callable
    batch: Callable


# --- batches ----------------------------------------------------------------------------------------------------------


def integers(generator, low, high, *shape):
    return torch.randint(low, high, shape, generator=generator)


def tokens(generator, size):
    """Token ids whose rows end in padding, and their mask."""
    batch, length = SHAPES[size]
    ids = integers(generator, 3, VOCABULARY, batch, length)
    mask = (torch.arange(length) < integers(generator, length // 2, length + 1, batch, 1)).long()
    return ids * mask, mask


def language(module, size, generator):
    """Labels are the ids themselves, none on padding."""
    ids, mask = tokens(generator, size)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translation(module, size, generator):
    batch = language(module, size, generator)
    labels = integers(generator, 3, VOCABULARY, len(batch["labels"]), SHAPES[size][1] + 2)
    return {**batch, "labels": labels}


def sentence(module, size, generator):
    ids, mask = tokens(generator, size)
    return {"input_ids": ids, "attention_mask": mask, "labels": integers(generator, 0, CLASSES, len(ids))}


def flags(module, size, generator):
    ids, mask = tokens(generator, size)
    return {"input_ids": ids, "attention_mask": mask, "labels": integers(generator, 0, 2, *ids.shape)}


def image(side):
    def batch(module, size, generator):
        count = SHAPES[size][0]
        pixels = torch.randn(count, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": integers(generator, 0, CLASSES, count)}

    return batch


def pairs(module, size, generator):
    pixels = image(24)(module, size, generator)["pixel_values"]
    ids, mask = tokens(generator, size)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def speech(module, size, generator):
    batch, length = SHAPES[size]
    labels = integers(generator, 3, VOCABULARY, batch, length)
    return {"input_features": torch.randn(batch, 8, 32, generator=generator), "labels": labels}


def vectors(*features):
    """Rows of features (or feature maps) with a class each, for modules written in torch."""

    def batch(module, size, generator):
        count, length = SHAPES[size]
        shape = [length if f is None else f for f in features]
        x = torch.randn(count, *shape, generator=generator)
        return {"x": x, "labels": integers(generator, 0, CLASSES, count)}

    return batch


# --- modules ----------------------------------------------------------------------------------------------------------


def without_dropout(config):
    """Sets every rate of the configuration to zero, nested configurations included."""
    for name, setting in list(vars(config).items()):
        if isinstance(setting, transformers.PretrainedConfig):
            without_dropout(setting)
        elif isinstance(setting, float) and ("drop" in name or "mask_time_prob" in name):
            setattr(config, name, 0.0)
    return config


def hf(model_type, head, batch, sizes=SMALL, **config):
    """A transformers architecture by the names of its configuration and head; `sizes` are the usual settings."""

    def build():
        made = transformers.AutoConfig.for_model(model_type, **{**sizes, **config})
        return getattr(transformers, f"AutoModel{head}").from_config(without_dropout(made))

    return Architecture(build, batch)


class Classifier(nn.Module):
    """Any module that maps x to features, with a loss."""

    def __init__(self, body, features):
        super().__init__()
        self.body, self.head = body, nn.Linear(features, CLASSES)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.body(x)), labels)


class Pool(nn.Module):
    def __init__(self, *axes):
        super().__init__()
        self.axes = axes

    def forward(self, x):
        return x.mean(self.axes)


def mlp():
    return Classifier(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh()), 16)


def cnn():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()]
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 16)


class BasicBlock(nn.Module):
    def __init__(self, width_in, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1 and width_in == width
        shortcut = [nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)]
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(widths=(8, 16), blocks=(1, 1)):
    """A residual network; widths (64, 128, 256, 512) and two blocks each make ResNet-18."""
    layers = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = widths[0]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for i in range(count):
            layers.append(BasicBlock(before, width, 2 if stage and not i else 1))
            before = width
    return Classifier(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), before)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return Classifier(nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), Pool(1)), 16)


class Translator(nn.Module):
    """nn.Transformer with embeddings, a causal mask and padding masks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        padding = attention_mask == 0
        causal = torch.ones(labels.shape[1], labels.shape[1], dtype=torch.bool, device=labels.device).triu(1)
        hidden = self.transformer(
            self.embed(input_ids),
            self.embed(labels),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def recurrent(cell):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(12, 16, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.cell(x)[0].mean(1)

    return lambda: Classifier(Last(), 32)


# --- the list ---------------------------------------------------------------------------------------------------------

SEQ2SEQ = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQ2SEQ |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "decoder_start_token_id": 1}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
VISION = {"image_size": 24, "patch_size": 8}
CONV = {"hidden_sizes": [8, 16], "depths": [1, 1]}
SWIN = {"image_size": 32, "patch_size": 4, "window_size": 4, "num_heads": [2, 4], "depths": [1, 1], "embed_dim": 8}
FUNNEL = {"n_head": 4, "d_head": 8, "d_inner": 64}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
KV = {"num_key_value_heads": 2, "head_dim": 8}

#: Every node of these runs in the engine: no ATen and no Python operator.
PURE = {
    "gpt2": hf("gpt2", "ForCausalLM", language),
    "llama": hf("llama", "ForCausalLM", language, **KV),
    "qwen3": hf("qwen3", "ForCausalLM", language, **KV),
    "mistral": hf("mistral", "ForCausalLM", language, sliding_window=6, **KV),
    "opt": hf("opt", "ForCausalLM", language, ffn_dim=64, word_embed_proj_dim=32),
    "bert": hf("bert", "ForMaskedLM", language),
    "bert-classifier": hf("bert", "ForSequenceClassification", sentence),
    "roberta": hf("roberta", "ForMaskedLM", language),
    "distilbert": hf("distilbert", "ForMaskedLM", language, hidden_dim=64),
    "electra": hf("electra", "ForPreTraining", flags, embedding_size=16),
    "albert": hf("albert", "ForMaskedLM", language, embedding_size=16),
    "t5": hf("t5", "ForSeq2SeqLM", translation, **T5),
    "bart": hf("bart", "ForSeq2SeqLM", translation, **SEQ2SEQ),
    "vit": hf("vit", "ForImageClassification", image(24), **VISION),
}

#: As the others, and captured whole; operators that ONNX cannot say may run through PyTorch.
MORE = {
    "resnet": Architecture(resnet, vectors(3, 32, 32)),
    "transformer": Architecture(Translator, translation),
    "transformer-encoder": Architecture(encoder, vectors(None, 16)),
    "mlp": Architecture(mlp, vectors(12)),
    "cnn": Architecture(cnn, vectors(3, None, None)),
    "hf-resnet": hf("resnet", "ForImageClassification", image(32), embedding_size=8, **CONV),
    "gpt-neox": hf("gpt_neox", "ForCausalLM", language),
    "gptj": hf("gptj", "ForCausalLM", language, n_embd=32, n_head=4, n_layer=2, rotary_dim=4),
    "falcon": hf("falcon", "ForCausalLM", language),
    "phi": hf("phi", "ForCausalLM", language),
    "phi3": hf("phi3", "ForCausalLM", language),
    "gemma": hf("gemma", "ForCausalLM", language, **KV),
    "gemma2": hf("gemma2", "ForCausalLM", language, **KV),
    "gemma3": hf("gemma3_text", "ForCausalLM", language, **KV),
    "qwen2": hf("qwen2", "ForCausalLM", language, **KV),
    "stablelm": hf("stablelm", "ForCausalLM", language, num_key_value_heads=2),
    "olmo2": hf("olmo2", "ForCausalLM", language),
    "starcoder2": hf("starcoder2", "ForCausalLM", language, num_key_value_heads=2),
    "granite": hf("granite", "ForCausalLM", language),
    "smollm3": hf("smollm3", "ForCausalLM", language, num_key_value_heads=2),
    "deberta": hf("deberta", "ForMaskedLM", language),
    "deberta-v2": hf("deberta-v2", "ForMaskedLM", language),
    "mpnet": hf("mpnet", "ForMaskedLM", language),
    "roformer": hf("roformer", "ForMaskedLM", language),
    "squeezebert": hf("squeezebert", "ForMaskedLM", language, embedding_size=32),
    "convbert": hf("convbert", "ForMaskedLM", language, embedding_size=16),
    "modernbert": hf("modernbert", "ForMaskedLM", language, cls_token_id=1, sep_token_id=2),
    "megatron-bert": hf("megatron-bert", "ForMaskedLM", language),
    "pegasus": hf("pegasus", "ForSeq2SeqLM", translation, **SEQ2SEQ),
    "marian": hf("marian", "ForSeq2SeqLM", translation, **SEQ2SEQ),
    "mbart": hf("mbart", "ForSeq2SeqLM", translation, **SEQ2SEQ),
    "m2m-100": hf("m2m_100", "ForSeq2SeqLM", translation, **SEQ2SEQ),
    "dinov2": hf("dinov2", "ForImageClassification", image(24), **VISION),
    "convnext": hf("convnext", "ForImageClassification", image(32), num_stages=2, **CONV),
    "mobilenet-v2": hf("mobilenet_v2", "ForImageClassification", image(32), NAMES, depth_multiplier=0.25),
    "poolformer": hf("poolformer", "ForImageClassification", image(64), hidden_sizes=[8, 16, 16, 16], depths=[1] * 4),
    "lstm": Architecture(recurrent(nn.LSTM), vectors(None, 12)),
    "gru": Architecture(recurrent(nn.GRU), vectors(None, 12)),
    "cohere": hf("cohere", "ForCausalLM", language),
    "xlnet": hf("xlnet", "ForCausalLM", language, NAMES, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "segformer": hf("segformer", "ForImageClassification", image(32), NAMES, **SEGFORMER),
    "beit": hf("beit", "ForImageClassification", image(24), **VISION),
}

#: Hard to capture: loops over the data, sizes that depend on values, constants of the batch, functions with a backward
#: of their own. The engine runs them all, with operators that PyTorch runs inside the graph.
HARD = {
    "bloom": hf("bloom", "ForCausalLM", language),
    "mixtral": hf("mixtral", "ForCausalLM", language, num_local_experts=2, **KV),
    "mamba": hf("mamba", "ForCausalLM", language, num_hidden_layers=1),
    "funnel": hf("funnel", "ForMaskedLM", language, NAMES, block_sizes=[1, 1], d_model=32, **FUNNEL),
    "fnet": hf("fnet", "ForMaskedLM", language),
    "clip": hf("clip", "", pairs, text_config=SMALL, vision_config=SMALL | VISION, projection_dim=16),
    "swin": hf("swin", "ForImageClassification", image(32), NAMES, **SWIN),
    "whisper": hf("whisper", "ForSpeechSeq2Seq", speech, num_mel_bins=8, max_source_positions=16, **SEQ2SEQ),
}
#: Compared in float64 only. 52 batch normalisations over a few pixels multiply rounding errors: PyTorch's own float32
#: gradients are 1.5e-4 off the exact ones.
ILL_CONDITIONED = {"mobilenet-v2": MORE["mobilenet-v2"]}

ARCHITECTURES = PURE | MORE | HARD
