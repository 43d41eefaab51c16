"""ORTTrainer: the losses of a loop, accumulation, schedules, precision, settings of the engine, evaluation, ONNX."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from ortmodule import Config, ModuleWithLoss, ORTModule, ORTTrainer, ORTTrainerOptions, explain, optim
from ortmodule.optim import AdamConfig, AdamWMode, DynamicLossScaler, FusedAdam, LambConfig, SGDConfig, lr_scheduler
from ortmodule.trainer import TrainStepInfo
from tests.selection import each
from tests.trainer import small
from tests.trainer.small import batches


def same_weights(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_losses_of_a_loop():
    """The same bits as ORTModule, FusedAdam and a clipped norm, with a group of its own."""
    groups = [{"params": ["0.bias", "3.bias"], "lambda_coef": 0.0, "lr": 0.05}]
    ours = small.trainer(config=AdamConfig(groups, lr=0.01, lambda_coef=0.1), description=small.ONLY_LOSS)
    theirs = small.model()
    wrapped = ORTModule(ModuleWithLoss(theirs, nn.CrossEntropyLoss()))
    biases, weights = ([p for p in theirs.parameters() if p.dim() == d] for d in (1, 2))
    optimizer = FusedAdam(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.05}], lr=0.01, eps=1e-8,
        adam_w_mode=AdamWMode.ADAMW_TORCH,
    )  # fmt: skip
    for x, label in batches(5):
        loss = wrapped(x, labels=label)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(ours.train_step(x, label), loss.detach())
    assert same_weights(ours.model, theirs)
    assert explain(ours.engine).captured
    info = ours.train_step_info
    assert (info.step, info.optimization_step, info.all_finite) == (5, 5, True)


def test_outputs_and_evaluation():
    ours = small.trainer(dropout=0.5)
    ((x, label),) = batches(1)
    loss, logits = ours.train_step(label=label, x=x)
    assert loss.shape == () and logits.shape == (8, 3) and not logits.requires_grad and ours.model.training
    expected = ours.model.eval()(x)
    loss, logits = ours.eval_step(x, label)
    torch.testing.assert_close(logits, expected.detach())
    torch.testing.assert_close(loss, nn.functional.cross_entropy(expected, label).detach())
    torch.testing.assert_close(ours.eval_step(x), logits)
    torch.testing.assert_close(ours.eval_step(x[:3], label[:3])[1], logits[:3])


class Whole(nn.Module):
    """Computes its loss, and takes arguments by name."""

    def __init__(self, named):
        super().__init__()
        self.net, self.named = small.model(), named

    def forward(self, x, weight=None, label=None):
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, label)
        return {"logits": logits, "loss": loss} if self.named else (loss, logits)


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_computes_its_loss(named):
    ours = ORTTrainer(Whole(named), small.DESCRIPTION, AdamConfig(lr=0.01, lambda_coef=0.01))
    other = small.trainer()
    for x, label in batches(2):
        for a, b in zip(ours.train_step(x, label), other.train_step(x, label), strict=True):
            torch.testing.assert_close(a, b)


def test_accumulation():
    """Two halves of a batch, and nothing in between."""
    ours = small.trainer({"batch": {"gradient_accumulation_steps": 2}}, config=SGDConfig(lr=0.1))
    whole = small.trainer(config=SGDConfig(lr=0.1))
    for x, label in batches(3):
        before = ours.model[0].weight.clone()
        ours.train_step(x[:4], label[:4])
        assert torch.equal(ours.model[0].weight, before)
        ours.train_step(x[4:], label[4:])
        whole.train_step(x, label)
        torch.testing.assert_close(ours.model[0].weight, whole.model[0].weight)
    assert (ours.train_step_info.step, ours.train_step_info.optimization_step) == (6, 3)


OTHERS = [LambConfig(lr=0.01), SGDConfig(lr=0.1)]
ZERO = {"deepspeed_zero_optimization": {"stage": 1}}  # one process has all states


@each("config", OTHERS, OTHERS[:1], ids=["lamb", "sgd"])
def test_other_optimizers(config):
    ours, x, label = small.trainer({"distributed": ZERO}, config=config), *batches(1)[0]
    losses = [float(ours.train_step(x, label)[0]) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05 and type(ours.optimizer) is config.optimizer


def test_frozen_weights_and_seed():
    before = small.model()[0].weight
    draws = []
    for _ in range(2):
        ours = small.trainer({"utils": {"frozen_weights": ["0.weight"]}, "seed": 7}, dropout=0.5)
        draws.append([ours.train_step(*batch)[0] for batch in batches(3)])
        assert torch.equal(ours.model[0].weight, before) and not torch.equal(ours.model[0].bias, small.model()[0].bias)
    assert draws[0] == draws[1]


def test_settings_of_the_engine(monkeypatch):
    for switches, level in (
        ({}, 0), ({"transformer_layer_recompute": True}, 1), ({"gelu_recompute": True}, 2),
        ({"attn_dropout_recompute": True, "transformer_layer_recompute": True}, 2),
    ):  # fmt: skip
        ours = small.trainer({"graph_transformer": switches, "device": {"mem_limit": 2**30}})
        config = ours.engine._ortmodule.config
        assert (config.memory_opt_level, config.memory_budget) == (level, 2**30)
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    assert small.trainer().engine._ortmodule.config.memory_opt_level == 1
    assert Config().memory_opt_level == 0


# --- precision --------------------------------------------------------------------------------------------------------


def test_bfloat16():
    ours = small.trainer({"mixed_precision": {"enabled": True}})
    assert ours.loss_scaler is None
    exact = small.trainer()
    found, expected = (torch.stack([t.train_step(*batches(1)[0])[0] for _ in range(3)]) for t in (ours, exact))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(found[0], expected[0])


class Loss(nn.Module):
    """Overflows once. The factor is an input of the graph, as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, logits, label):
        return nn.functional.cross_entropy(logits, label) * self.factor


@pytest.mark.parametrize("clip", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_loss_scaler_leaves_an_overflow_out(clip):
    scaler, loss = DynamicLossScaler(loss_scale=1024.0, up_scale_window=2), Loss()
    options = {"enabled": True, "dtype": "bfloat16", "loss_scaler": scaler}
    ours = small.trainer({"mixed_precision": options, "utils": {"grad_norm_clip": clip}}, loss=loss)
    seen = []
    for i, (x, label) in enumerate(batches(4)):
        before = ours.model[0].weight.clone()
        loss.factor.fill_(math.inf if i == 1 else 1.0)
        ours.train_step(x, label)
        seen.append((ours.train_step_info.all_finite, torch.equal(before, ours.model[0].weight), scaler.loss_scale))
    assert seen == [(True, False, 1024.0), (False, True, 512.0), (True, False, 512.0), (True, False, 1024.0)]


# --- learning rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler, expected",
    [
        (lr_scheduler.ConstantWarmupLRScheduler(10, 0.4), [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1]),
        (lr_scheduler.LinearWarmupLRScheduler(10, 0.2), [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0]),
        (lr_scheduler.CosineWarmupLRScheduler(8, warmup=0.5), [0, 0.25, 0.5, 0.75, 1, 0.853553, 0.5, 0.146447, 0, 0]),
        (
            lr_scheduler.CosineWarmupLRScheduler(8, 1.0, 0.0),
            [1, 0.853553, 0.5, 0.146447, 0, 0.146447, 0.5, 0.853553, 1],
        ),
        (lr_scheduler.PolyWarmupLRScheduler(5, 0.2, 2.0, 0.2), [0, 1, 0.65, 0.4, 0.25, 0.2, 0.2]),
    ],
)
def test_schedules(scheduler, expected):
    config = AdamConfig(lr=1.0)
    found = [scheduler.get_lr(TrainStepInfo(config, optimization_step=i))[0] for i in range(len(expected))]
    assert found == pytest.approx(expected, abs=1e-6)


def test_rates_of_groups():
    schedule = lr_scheduler.LinearWarmupLRScheduler(4, 0.5)
    config = AdamConfig([{"params": ["3.bias"], "lr": 0.3}], lr=0.1)
    ours = small.trainer({"lr_scheduler": schedule}, config=config)
    found, before = [], ours.model[3].bias.clone()
    for batch in batches(5):
        ours.train_step(*batch)
        found.append([group["lr"] for group in ours.optimizer.param_groups])
        assert schedule.get_last_lr() == [found[-1][0]]
        assert len(found) > 1 or torch.equal(ours.model[3].bias, before)
    assert torch.tensor(found).T.tolist() == [pytest.approx([k * f for f in (0, 0.5, 1, 0.5, 0)]) for k in (0.1, 0.3)]


# --- ONNX -------------------------------------------------------------------------------------------------------------


def test_save_as_onnx(tmp_path):
    ours = small.trainer(dropout=0.5)
    with pytest.raises(RuntimeError, match="needs a train_step or eval_step before"):
        ours.save_as_onnx(tmp_path / "model.onnx")
    ours.train_step(*batches(1)[0])
    ours.save_as_onnx(tmp_path / "model.onnx")
    assert ours.model.training and [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    saved = onnx.load(tmp_path / "model.onnx")
    axes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in (*saved.graph.input, *saved.graph.output)}  # fmt: skip
    assert axes == {"x": ["batch", 6], "logits": ["batch", 3]}
    x = batches(1, 5)[0][0]
    expected = ours.eval_step(x)
    (found,) = ReferenceEvaluator(saved).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected)
    with pytest.raises(FileNotFoundError, match="none is no folder"):
        ours.save_as_onnx(tmp_path / "none" / "model.onnx")


RUN = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
numpy.save(sys.argv[3], session.run(["logits"], {"x": numpy.load(sys.argv[2])})[0])
"""


def test_onnxruntime_opens_it(tmp_path):
    """With the same logits as `eval_step`, for another number of rows."""
    folder = Path(sys.prefix) / "onnxruntime"  # scripts/common.sh
    if not folder.is_dir():
        pytest.skip("scripts/common.sh could not install onnxruntime")
    ours = small.trainer()
    ours.train_step(*batches(1)[0])
    ours.save_as_onnx(tmp_path / "model.onnx")
    x = batches(1, 5)[0][0]
    numpy.save(tmp_path / "x.npy", x.numpy())
    files = [str(tmp_path / name) for name in ("model.onnx", "x.npy", "logits.npy")]
    subprocess.run([sys.executable, "-c", RUN, *files], env=os.environ | {"PYTHONPATH": str(folder)}, check=True)
    logits = torch.from_numpy(numpy.load(tmp_path / "logits.npy"))
    torch.testing.assert_close(logits, ours.eval_step(x))


def test_public_names():
    assert optim.AdamConfig is AdamConfig and ORTTrainerOptions({}).seed is None
    with pytest.raises(AttributeError, match="ORTTrayner"):
        import ortmodule

        ortmodule.ORTTrayner  # noqa: B018
