"""Makes a small classifier, its batches and its description, for tests of ORTTrainer."""

import torch
from torch import nn

from ortmodule import ORTTrainer, ORTTrainerOptions
from ortmodule.optim import AdamConfig

DESCRIPTION = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}
ONLY_LOSS = {**DESCRIPTION, "outputs": DESCRIPTION["outputs"][:1]}


def model(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def batches(count, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def trainer(options=None, dropout=0.0, description=DESCRIPTION, config=None, loss=None):
    config = config or AdamConfig(lr=0.01, lambda_coef=0.01)
    loss = loss or nn.CrossEntropyLoss()
    return ORTTrainer(model(dropout), description, config, loss, ORTTrainerOptions(options or {}))
