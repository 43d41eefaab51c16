"""Training with dropout: the masks, their reproducibility, and where 200 steps end; modes of submodules."""

import copy

import pytest
import torch
import transformers
from torch import nn

from ortmodule import ORTModule, explain
from tests.models.compare import assert_same_step, step
from tests.models.zoo import SMALL, hf, language, mlp, vectors

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers

ROWS, WIDTH = 256, 512


class Dropped(nn.Module):
    """Dropout alone; the parameter makes it a module to train and its gradient is the mask."""

    def __init__(self, rate):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ROWS, WIDTH))
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return self.dropout(x * self.scale)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_mask(rate, two_threads):
    model = ORTModule(Dropped(rate))
    x = torch.ones(ROWS, WIDTH)

    def masked(seed, threads=2):
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        model.zero_grad()
        y = model(x)
        y.backward(torch.ones_like(y))
        return y.detach().clone()

    y = masked(0)
    kept = y != 0
    spread = (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs(1 - kept.float().mean() - rate) < 5 * spread
    assert abs(1 - kept.float().mean(0) - rate).max() < 6 * (rate * (1 - rate) / ROWS) ** 0.5
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / (1 - rate)))
    assert torch.equal(model.scale.grad, y), "backward used another mask"
    assert torch.equal(masked(0), y), "the same seed gave another mask"
    assert torch.equal(masked(0, threads=1), y), "the number of threads changed the mask"
    assert not torch.equal(masked(1), y), "another seed gave the same mask"
    with torch.no_grad():
        torch.manual_seed(0)
        assert torch.equal(model(x), y), "the same seed gave another mask without gradients"
    assert torch.equal(model.eval()(x), x), "dropout in eval mode"


def test_masks_of_two_layers_and_two_runs_differ():
    class Twice(Dropped):
        def forward(self, x):
            return self.dropout(x * self.scale), self.dropout(x * self.scale)

    model = ORTModule(Twice(0.5))
    x = torch.ones(ROWS, WIDTH)
    first, second = model(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first, model(x)[0])


def bert(hidden, attention):
    rates = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **rates))


def test_same_bits_from_run_to_run():
    torch.manual_seed(0)
    batch = language(None, 0, torch.Generator().manual_seed(0))
    model = ORTModule(bert(0.1, 0.1))
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        loss, grads = step(model, batch)
        results.append([loss, *(g.clone() for g in grads.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Sequence(nn.Module):
    """A small classifier with dropout between its layers, for a task that takes a few hundred steps."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(12, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)]
        self.body = nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.body(x), labels)


def train(model, seed, steps=200):
    """Mean loss of the last steps."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(99)
    teacher = torch.randn(12, 5, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 12, generator=generator)
        loss = model(x, (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-25:]) / 25


def test_training_ends_where_eager_does():
    torch.manual_seed(0)
    start = Sequence()
    eager = [train(copy.deepcopy(start), seed) for seed in range(5)]
    ours = [train(ORTModule(copy.deepcopy(start)), seed) for seed in range(5)]
    margin = max(eager) - min(eager)
    assert max(eager) < 0.6, "the task is too hard for the test to mean anything"
    assert min(eager) - margin <= sum(ours) / 5 <= max(eager) + margin
    assert min(eager) - 2 * margin <= min(ours) and max(ours) <= max(eager) + 2 * margin


# --- modes ------------------------------------------------------------------------------------------------------------


def test_mixed_modes():
    """A submodule in eval mode drops nothing although the model trains, and every mode stays as it was."""
    torch.manual_seed(0)
    model = bert(0.3, 0.0)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
    model.bert.encoder.layer[0].eval()
    modes = {name: part.training for name, part in model.named_modules()}
    batch = language(None, 0, torch.Generator().manual_seed(0))
    expected = step(copy.deepcopy(model), batch)
    wrapped = ORTModule(model)
    assert_same_step(step(wrapped, batch), expected, "mixed modes")
    assert {name: part.training for name, part in wrapped.named_modules()} == modes


def test_frozen_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[1].eval()
    eager, ours = copy.deepcopy(model), ORTModule(model)
    for seed in range(3):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(ours(x), eager(x))
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_switching_modes_uses_the_cached_graphs():
    model = ORTModule(mlp())
    batch = vectors(12)(None, 0, torch.Generator().manual_seed(0))
    step(model, batch)
    with torch.no_grad():
        model.eval()(**batch)
    exports = explain(model).exports
    for _ in range(2):
        step(model.train(), batch)
        with torch.no_grad():
            model.eval()(**batch)
    assert explain(model).exports == exports


def test_gradient_accumulates_and_two_models_interleave():
    """forward a, forward b, backward b, backward a, twice: gradients add up and no run overwrites another's memory."""
    pairs = []
    for seed in range(2):
        torch.manual_seed(seed)
        eager = hf("bert", "ForMaskedLM", language).build().train()
        pairs.append((ORTModule(copy.deepcopy(eager)), eager))
    for _ in range(2):
        losses = []
        for seed, (ours, eager) in enumerate(pairs):
            batch = language(None, seed, torch.Generator().manual_seed(seed))
            losses.append((ours(**batch).loss, eager(**batch).loss))
        for a, b in reversed(losses):
            a.backward()
            b.backward()
    for ours, eager in pairs:
        for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
