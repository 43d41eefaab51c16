"""Learning rates go up linearly, and then stay or go down as their schedule says."""

from types import SimpleNamespace

import pytest
import torch

from ortmodule.optim import lr_scheduler as schedulers

LR, STEPS, WARMUP = 0.5, 20, 0.25


def rates(scheduler, steps=range(STEPS + 3), lr=LR):
    config = SimpleNamespace(lr=lr)
    return [scheduler.get_lr(SimpleNamespace(optimization_step=n, optimizer_config=config))[0] for n in steps]


KINDS = {
    schedulers.ConstantWarmupLRScheduler: lambda part: 1.0,
    schedulers.LinearWarmupLRScheduler: lambda part: 1 - part,
    schedulers.CosineWarmupLRScheduler: lambda part: (1 + torch.cos(torch.tensor(torch.pi * part))).item() / 2,
    schedulers.PolyWarmupLRScheduler: lambda part: (LR - 1e-7) / LR * (1 - part) + 1e-7 / LR,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_way(kind):
    found = rates(kind(STEPS, warmup=WARMUP))
    up = [LR * n / 5 for n in range(5)]
    down = [LR * KINDS[kind](min(1.0, n / 15)) for n in range(STEPS - 5 + 3)]
    assert found == pytest.approx([*up, *down], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_without_warmup(kind):
    assert rates(kind(STEPS, warmup=0))[0] == pytest.approx(LR)
    assert rates(kind(1, warmup=0.5), range(1)) == [0.0]


def test_waves_and_powers():
    waves = rates(schedulers.CosineWarmupLRScheduler(8, cycles=1, warmup=0), range(9))
    assert waves[4] == pytest.approx(0) and waves[8] == pytest.approx(LR)
    power = rates(schedulers.PolyWarmupLRScheduler(4, lr_end=0.0, power=2, warmup=0), range(5))
    assert power == pytest.approx([LR * (1 - n / 4) ** 2 for n in range(5)])


def test_the_latest():
    scheduler = schedulers.ConstantWarmupLRScheduler(STEPS)
    assert scheduler.get_last_lr() == []
    scheduler._step(SimpleNamespace(optimization_step=9, optimizer_config=SimpleNamespace(lr=LR)))
    assert scheduler.get_last_lr() == [LR]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: schedulers.LinearWarmupLRScheduler(0), "total_steps must be 1 or more"),
        (lambda: schedulers.LinearWarmupLRScheduler(5, warmup=1), "warmup is a part of all steps"),
        (lambda: schedulers.CosineWarmupLRScheduler(5, cycles=0), "cycles must be above 0"),
        (lambda: schedulers.PolyWarmupLRScheduler(5, power=-1), "must not be below 0"),
        (lambda: rates(schedulers.PolyWarmupLRScheduler(5, lr_end=1.0)), "is not above lr_end"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
