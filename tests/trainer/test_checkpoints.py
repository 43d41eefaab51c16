"""Checkpoints of ORTTrainer: the same bits go on, a killed process loses nothing, other files are refused."""

import os
import random
import signal
import time

import pytest
import torch

from ortmodule.core.settings import safe_files
from ortmodule.optim import AdamConfig, DynamicLossScaler, LambConfig, SGDConfig, lr_scheduler
from ortmodule.trainer import checkpoint
from tests.selection import each
from tests.trainer import small
from tests.trainer.small import batches

OPTIONS = {"batch": {"gradient_accumulation_steps": 2}}


def scaled():
    scaler = DynamicLossScaler(loss_scale=256.0, up_scale_window=2)
    return {**OPTIONS, "mixed_precision": {"enabled": True, "dtype": "bfloat16", "loss_scaler": scaler}}


def scheduled():
    return {"lr_scheduler": lr_scheduler.CosineWarmupLRScheduler(10, warmup=0.3)}


KINDS = [
    (AdamConfig(lr=0.01, lambda_coef=0.1), small.DESCRIPTION, OPTIONS.copy),
    (LambConfig(lr=0.01), small.ONLY_LOSS, scheduled),
    (AdamConfig(lr=0.01), small.ONLY_LOSS, scaled),
    (SGDConfig(lr=0.1), small.ONLY_LOSS, dict),
]


@each("config, description, options", KINDS, lambda kind: kind is KINDS[0])
def test_the_same_bits_go_on(config, description, options, tmp_path):
    """Also with dropout, and in the middle of an accumulation."""

    def made():
        return small.trainer(options(), 0.3, description, config)

    first, data = made(), batches(9)
    for batch in data[:5]:
        first.train_step(*batch)
    first.save_checkpoint(tmp_path / "model.pt", {"epoch": 3, "order": torch.arange(4)})
    other = made()
    torch.manual_seed(99)
    user = other.load_checkpoint(tmp_path / "model.pt")
    assert user["epoch"] == 3 and user["order"].tolist() == [0, 1, 2, 3]
    assert other.train_step_info.step == 5
    found = [torch.as_tensor(loss_of(other.train_step(*batch))) for batch in data[5:]]
    first.train_step(*data[0])
    for trainer in (made(), first):  # and in one that has gone on
        torch.manual_seed(98)
        trainer.load_checkpoint(tmp_path / "model.pt")
        assert [loss_of(trainer.train_step(*batch)) for batch in data[5:]] == found
        for p, q in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)
    whole = made()
    assert [loss_of(whole.train_step(*batch)) for batch in data][5:] == found


def loss_of(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


# --- a process that is killed -----------------------------------------------------------------------------------------


def save_forever(path):
    """States of one number, each in all tensors."""
    number = 0
    while True:
        number += 1
        checkpoint.write(path, {"model": {f"{i}": torch.full((3000,), number) for i in range(8)}, "number": number})


def test_a_killed_process_loses_nothing(tmp_path):
    path, generator, numbers = tmp_path / "model.pt", random.Random(0), []
    checkpoint.write(path, {"model": {}, "number": 0})
    for _ in range(50):
        child = os.fork()
        if child == 0:
            save_forever(path)
        time.sleep(generator.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        state = checkpoint.read(path)
        assert all((tensor == state["number"]).all() for tensor in state["model"].values())
        numbers.append(state["number"])
    checkpoint.write(path, {"model": {}})
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]  # nothing is left of them


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_loses_nothing(call, tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    checkpoint.write(path, {"number": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    if call == "write":
        monkeypatch.setattr(torch, "save", full)
    else:
        monkeypatch.setattr(safe_files.os, call, full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(path, {"number": 2})
    monkeypatch.undo()
    assert checkpoint.read(path)["number"] == 1 and len(list(tmp_path.iterdir())) == 1


def test_it_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(safe_files.os, name, lambda *a, f=original, n=name: (calls.append(n), f(*a))[1])
    checkpoint.write(tmp_path / "model.pt", {})
    assert calls == ["fsync", "replace", "fsync"]


# --- files that are none ----------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_short(tmp_path):
    ours = small.trainer()
    ours.train_step(*batches(1)[0])
    path, before = tmp_path / "model.pt", ours.model[0].weight.clone()
    ours.save_checkpoint(path)
    ours.train_step(*batches(1)[0])
    after, content = ours.model[0].weight.clone(), path.read_bytes()
    for part in (0.0, 0.01, 0.3, 0.7, 0.95, 0.999):
        path.write_bytes(content[: int(part * len(content))])
        with pytest.raises(ValueError, match="model.pt is no checkpoint, or it is cut short"):
            ours.load_checkpoint(path)
        assert torch.equal(ours.model[0].weight, after)
    path.write_bytes(content)
    ours.load_checkpoint(path)
    assert torch.equal(ours.model[0].weight, before)


def test_other_files(tmp_path):
    ours = small.trainer()
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*none\.pt"):
        ours.load_checkpoint(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError, match="none is no folder"):
        ours.save_checkpoint(tmp_path / "none" / "model.pt")
    torch.save(ours.model.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"weights\.pt is no checkpoint of an ORTTrainer"):
        ours.load_checkpoint(tmp_path / "weights.pt")
    with pytest.raises(TypeError, match=r"user_dict\['sampler'\] is a AdamConfig, which a checkpoint does not hold"):
        ours.save_checkpoint(tmp_path / "model.pt", {"sampler": AdamConfig()})
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda s: s["model"].pop("3.bias"), "has no 3.bias, which the model has"),
        (lambda s: s["model"].update(more=torch.ones(1)), "has more, which the model has not"),
        (lambda s: s["model"].update({"3.bias": torch.ones(4)}), r"has 3.bias of shape \[4\], the model of \[3\]"),
        (lambda s: s.update(loss_scaler={"loss_scale": 2.0}), "is of a training with a loss scaler, this one is not"),
        (lambda s: s["optimizer"]["param_groups"][0].pop("betas"), "not the state of a FusedAdam"),
    ],
)
def test_states_of_others(change, text):
    ours = small.trainer()
    before, state = ours.model[0].weight.clone(), {**ours.state_dict()}
    state["model"] = {name: value + 1 for name, value in state["model"].items()}
    change(state)
    with pytest.raises(ValueError, match=text):
        ours.load_state_dict(state)
    assert torch.equal(ours.model[0].weight, before)
