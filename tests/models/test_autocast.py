"""Whole models under CPU autocast, dropout on: every gradient is as near to float64's as PyTorch's own."""

import pytest
import torch
import transformers
from torch import nn

from tests.exact import check_step
from tests.models import zoo
from tests.models.zoo import KV, PURE, SMALL, T5, VISION
from tests.selection import each

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers


def hf(model_type, head, **config):
    """As in the zoo, with the configuration's own dropout."""

    def build():
        made = transformers.AutoConfig.for_model(model_type, **{**SMALL, **config})
        return getattr(transformers, f"AutoModel{head}").from_config(made)

    return build


class Convolutions(nn.Module):
    """With batch norm, dropout of elements and of channels."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.MaxPool2d(2),
            nn.Dropout2d(0.2), nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.GELU(), nn.Conv2d(16, 32, 1),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, zoo.CLASSES),
        )  # fmt: skip

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.body(x), labels)


def dropping(build, rate=0.1):
    """Sets every rate of a module's dropout; and GELU, since a ReLU whose operand is within a rounding of 0 takes one
    side here and the other there, and all of its gradient with it."""

    def built():
        module = build()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = rate
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = rate
            if hasattr(part, "activation"):
                part.activation = nn.functional.gelu
        return module

    return built


def pixels(module, size, generator):
    count = 6 + 2 * size
    return {
        "x": torch.randn(count, 3, 12, 12, generator=generator),
        "labels": zoo.integers(generator, 0, zoo.CLASSES, count),
    }


DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
MODELS = {
    "gpt2": (hf("gpt2", "ForCausalLM"), PURE["gpt2"].batch),
    "bert": (hf("bert", "ForMaskedLM"), PURE["bert"].batch),
    "llama": (hf("llama", "ForCausalLM", attention_dropout=0.1, **KV), PURE["llama"].batch),
    "t5": (hf("t5", "ForSeq2SeqLM", **T5), PURE["t5"].batch),
    "vit": (hf("vit", "ForImageClassification", **VISION, **DROPOUT), PURE["vit"].batch),
    "convolutions": (Convolutions, pixels),
    "transformer": (dropping(zoo.Translator), zoo.MORE["transformer"].batch),
}
EACH = [(name, dtype) for name in MODELS for dtype in (torch.bfloat16, torch.float16)]
SHORT = {
    ("gpt2", torch.bfloat16),
    ("gpt2", torch.float16),
    ("bert", torch.bfloat16),
    ("convolutions", torch.bfloat16),
    ("transformer", torch.float16),
    ("llama", torch.bfloat16),
    ("t5", torch.bfloat16),
    ("vit", torch.float16),
}


@each(("name", "dtype"), EACH, SHORT.__contains__, ids=lambda value: str(value).removeprefix("torch."))
def test_every_gradient(name, dtype):
    build, batch = MODELS[name]
    torch.manual_seed(0)
    module = build().train()
    ours = None
    for size, seed in ((0, 0), (1, 1)):
        given = batch(module, size, torch.Generator().manual_seed(seed))
        ours = check_step(module, given, autocast=dtype, seed=seed, wrapped=ours)
    _, recorder = ours
    assert recorder.draws, "nothing was dropped"
