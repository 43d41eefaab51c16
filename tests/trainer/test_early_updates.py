"""Weights that are updated while backward goes on are those of one update behind it; gradients do not wait."""

import warnings

import pytest
import torch
from torch import nn

from ortmodule import ORTTrainer, ORTTrainerOptions, explain
from ortmodule.optim import AdamConfig, DynamicLossScaler, SGDConfig, lr_scheduler
from ortmodule.trainer.early_updates import EarlyUpdates
from tests.trainer import small

WIDTH, DEPTH = 1024, 10  # of 4 MiB a weight: backward has two segments
ON = {"memory_efficient_gradient": True}


class Deep(nn.Module):
    """Its first and last product have one weight, whose gradient is complete at the end of backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / DEPTH
        return x


def trained(config, utils):
    """Losses, weights, and the bytes of gradients that were there at one time."""
    description = {"inputs": [("x", ["n", WIDTH]), ("y", ["n", WIDTH])], "outputs": [("loss", [], True)]}
    options = {"utils": utils, "lr_scheduler": lr_scheduler.LinearWarmupLRScheduler(6, warmup=0.5)}
    model = Deep()
    made = ORTTrainer(model, description, config, nn.MSELoss(), ORTTrainerOptions(options))
    most = [0]
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(q.grad.nbytes for q in model.parameters() if q.grad is not None))
        )
    generator = torch.Generator().manual_seed(1)
    losses = [float(made.train_step(*torch.randn(2, 4, WIDTH, generator=generator))) for _ in range(3)]
    report = explain(made.engine)
    assert report.captured and report.unreached_steps == 0 and all(p.grad is None for p in model.parameters())
    return losses, [p.detach() for p in model.parameters()], max(most), made.optimizer.state_dict()


@pytest.mark.parametrize("config", [SGDConfig(lr=0.5), AdamConfig(lr=0.01, lambda_coef=0.1, max_norm_clip=None)])
def test_the_same_bits(config):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses, weights, most, state = trained(config, ON)
    expected = trained(config, {})
    torch.testing.assert_close((losses, weights), expected[:2], rtol=0, atol=0)
    torch.testing.assert_close(dict(sorted(state["state"].items())), expected[3]["state"], rtol=0, atol=0)
    assert most < 0.75 * expected[2]


def test_segments():
    """A step for so many bytes, and one for what is left."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    optimizer = SGDConfig(lr=0.1).optimizer(layers.parameters(), lr=0.1)
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(sum(p.grad is not None for p in layers.parameters())))
    early = EarlyUpdates(optimizer, segment=2 * 8 * 8 * 4)
    layers(torch.ones(2, 8)).sum().backward()
    early.step()
    assert steps == [2, 2, 1]


@pytest.mark.parametrize(
    "options, config, reason",
    [
        ({}, AdamConfig(), "the norm of all gradients is clipped"),
        ({"batch": {"gradient_accumulation_steps": 2}}, SGDConfig(), "gradients of several steps are added up"),
        (
            {"mixed_precision": {"enabled": True, "loss_scaler": DynamicLossScaler()}},
            SGDConfig(),
            "a loss scaler looks",
        ),
    ],
)
def test_what_needs_all_gradients(options, config, reason):
    with pytest.warns(UserWarning, match=f"memory_efficient_gradient has no effect: {reason}"):
        made = small.trainer({**options, "utils": ON}, config=config)
    made.train_step(*small.batches(1)[0])
