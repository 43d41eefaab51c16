"""Loss scalers and autocast around a wrapped module and FusedAdam; neighbours that take the optimizer."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ortmodule import Config, ORTModule, explain
from ortmodule.optim import AdamWMode, DynamicLossScaler, FusedAdam, StaticLossScaler

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporter and of transformers
SETTINGS = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.01}


def rows(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2))


def fused(parameters):
    return FusedAdam(parameters, adam_w_mode=AdamWMode.ADAMW_TORCH, **SETTINGS)


# --- torch's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("clip", [False, True])
def test_autocast_with_grad_scaler(clip, dtype, tolerance):
    """The guideline's step in plain PyTorch: same losses, same skipped step, same scale."""
    seen = []
    for ours in (True, False):
        model = ORTModule(net()) if ours else net()
        optimizer = fused(model.parameters()) if ours else torch.optim.AdamW(model.parameters(), **SETTINGS)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        losses, scales = [], []
        for i in range(10):
            x, y = rows(i)
            with torch.autocast("cpu", dtype):
                loss = nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss * (math.inf if i == 4 else 1)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        if ours:
            assert explain(model).captured, explain(model).fallback
        seen.append((losses, scales))
    assert seen[0][1] == seen[1][1] and seen[0][1][4] == seen[0][1][3] / 2
    assert seen[0][0] == pytest.approx(seen[1][0], rel=tolerance)


class Words(nn.Module):
    """A small language model."""

    def __init__(self, attention):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(50, 32), nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 50)
        self.attention = attention

    def forward(self, ids):
        x = self.table(ids)
        h = self.first(x)
        q, k, v = (layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.attention == "operator":
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = (q @ k.mT / 4).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.last(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def infinite(make, attention, steps=24):
    """Which gradients are infinite in each step, and the scale behind it, which is doubled again and again."""
    torch.manual_seed(0)
    model, found, g = make(Words(attention)), [], torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randint(0, 50, (4, 12), generator=g))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        names = {name for name, p in model.named_parameters() if not p.grad.isfinite().all()}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((names, scaler.get_scale()))
    return found


@pytest.mark.parametrize("attention", ["operator", "written out"])
def test_infinities_in_the_steps_of_pytorch(attention):
    """Where gradients of weights are rounded to float16, as in PyTorch, and not written in float32 as they add up."""
    eager = infinite(lambda model: model, attention)
    assert sum(bool(names) for names, _ in eager) > 3
    assert infinite(lambda m: ORTModule(m, config=Config(disabled_passes="product_cast")), attention) == eager
    ours = infinite(ORTModule, attention)
    assert [scale for _, scale in ours] > [scale for _, scale in eager]


class Inside(nn.Module):
    """Products inside of other operators of torch."""

    FORMS = {
        "einsum": lambda s, x: torch.einsum("bij,jk->bik", x, s.w),
        "einsum of three": lambda s, x: torch.einsum("bij,jk,lk->bil", x, s.w, s.w),
        "einsum of both types": lambda s, x: torch.einsum("bij,jk->bik", s.linear(x), s.w),
        "einsum without a product": lambda s, x: torch.einsum("bij,j->bji", s.linear(x), s.w[:, 0]),
        "tensordot": lambda s, x: torch.tensordot(x, s.w, dims=1),
        "inner": lambda s, x: torch.inner(x, s.w.t()),
        "linalg.matmul": lambda s, x: torch.linalg.matmul(x, s.w),
        "linalg.multi_dot": lambda s, x: torch.linalg.multi_dot([x[0], s.w, s.w.t()]),
        "RNN": lambda s, x: s.rnn(x),
        "RNN of both types": lambda s, x: s.rnn(s.linear(x)),
        "GRU of both types": lambda s, x: s.gru(s.linear(x)),
        "LSTM of both types": lambda s, x: (lambda y, state: (y, *state))(*s.lstm(s.linear(x))),
        "RMSNorm": lambda s, x: s.norm(s.linear(x)),
    }

    def __init__(self, form):
        super().__init__()
        self.form, self.w, self.linear = form, nn.Parameter(torch.randn(16, 12)), nn.Linear(16, 16)
        self.rnn, self.gru, self.norm = nn.RNN(16, 8, batch_first=True), nn.GRU(16, 8), nn.RMSNorm(16)
        self.lstm = nn.LSTM(16, 8, num_layers=2, bidirectional=True)

    def forward(self, x):
        return self.FORMS[self.form](self, x)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("form", Inside.FORMS)
def test_autocast_of_products_inside(form, dtype, tolerance):
    torch.manual_seed(0)
    eager = Inside(form)
    ours, x, found = ORTModule(copy.deepcopy(eager)), torch.randn(2, 5, 16), []
    for module in (eager, ours):
        with torch.autocast("cpu", dtype):
            results = module(x)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        sum(t.float().square().sum() for t in results).backward()
        found.append((results, [p.grad for p in module.parameters() if p.grad is not None]))
    assert explain(ours).captured, explain(ours).fallback
    for expected, got in zip(*map(lambda pair: pair[0] + pair[1], found), strict=True):
        assert got.dtype is expected.dtype
        assert (got - expected).float().norm() <= tolerance * expected.float().norm()


# --- ours -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [fused, lambda p: torch.optim.SGD(p, lr=0.1)], ids=["FusedAdam", "SGD"])
@pytest.mark.parametrize("clip", [False, True])
def test_loss_scalers(clip, make):
    """Scaled and unscaled by powers of two: the bits of a training without. Overflows are skipped."""
    plain, scaled = net(), net()
    first, second = make(plain.parameters()), make(scaled.parameters())
    scaler = DynamicLossScaler(loss_scale=256.0, up_scale_window=2, max_loss_scale=512.0, min_loss_scale=128.0)
    scales, stepped = [], []
    for i in range(9):
        x, y = rows(i)
        overflow = i in (4, 5, 6)
        scaler.scale(nn.functional.mse_loss(scaled(x), y) * (math.nan if overflow else 1)).backward()
        if not overflow:
            nn.functional.mse_loss(plain(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            first.step()
        if clip:
            assert scaler.unscale_(second) is not overflow
            with pytest.raises(RuntimeError, match="unscaled already"):
                scaler.unscale_(second)
            nn.utils.clip_grad_norm_(scaled.parameters(), 0.5)
        stepped.append(scaler.step(second))
        scales.append(scaler.loss_scale)
        first.zero_grad(), second.zero_grad()
    assert scales == [256, 512, 512, 512, 256, 128, 128, 128, 256]
    assert stepped == [i not in (4, 5, 6) for i in range(9)]
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loss_scaler_states():
    model = net()
    optimizers = [fused(model[0].parameters()), fused(model[3].parameters())]
    scaler = DynamicLossScaler(automatic_update=False, loss_scale=4.0, up_scale_window=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[3].bias.grad[0] = math.inf
    assert [scaler.step(o) for o in optimizers] == [True, False] and scaler.loss_scale == 4.0
    scaler.update()
    assert scaler.loss_scale == 2.0
    optimizers[1].clip_grad_norm(1e-6)
    assert not scaler.step(optimizers[1]) and optimizers[1]._clipped is None  # that was for these gradients
    scaler.update()
    scaler.loss_scale = 2.0
    again = DynamicLossScaler()
    again.load_state_dict(copy.deepcopy(scaler.state_dict()))
    again.step(optimizers[0])
    again.update()
    assert again.loss_scale == 4.0 and scaler.loss_scale == 2.0
    again.reset()
    assert again.loss_scale == 4.0 and again.state_dict()["_stable_steps"] == 0
    static = StaticLossScaler(8.0)
    assert not static.step(optimizers[1]) and static.loss_scale == 8.0
    assert static.scale(torch.tensor(60000.0, dtype=torch.float16)) == 480000
    assert static.scale(torch.tensor(1.0, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ValueError, match="not the state of a DynamicLossScaler"):
        again.load_state_dict(static.state_dict())


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: StaticLossScaler(0.0), "above 0, not 0"),
        (lambda: StaticLossScaler(math.nan), "above 0, not nan"),
        (lambda: DynamicLossScaler(loss_scale=0.5), "0.5 is not between 1.0"),
        (lambda: DynamicLossScaler(max_loss_scale=math.inf), "not between"),
        (lambda: DynamicLossScaler(up_scale_window=0), "must be 1 or more, not 0"),
    ],
)
def test_bad_loss_scalers(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


# --- neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(accumulate):
    accelerate = pytest.importorskip("accelerate")
    losses = []
    for ours in (True, False):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = ORTModule(net()) if ours else net()
        optimizer = fused(model.parameters()) if ours else torch.optim.AdamW(model.parameters(), **SETTINGS)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        losses.append([])
        for i in range(8):
            x, y = rows(i)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_trainer(tmp_path):
    """`optimizer_cls_and_kwargs`, with saving and resuming."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    ids = torch.randint(0, 20, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def trained(folder, kind, wrap, **options):
        torch.manual_seed(0)
        model = wrap(transformers.GPT2LMHeadModel(config))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), per_device_train_batch_size=4, max_steps=6, logging_steps=1,
            save_steps=3, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, seed=7,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=data, optimizer_cls_and_kwargs=(kind, SETTINGS | options)
        )
        return trainer

    ours = trained("ours", FusedAdam, ORTModule, adam_w_mode=AdamWMode.ADAMW_TORCH)
    theirs = trained("theirs", torch.optim.AdamW, lambda model: model)
    for trainer in (ours, theirs):
        trainer.train()
    assert type(getattr(ours.optimizer, "optimizer", ours.optimizer)) is FusedAdam
    history = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (ours, theirs)]
    assert len(history[0]) == 6 and history[0] == pytest.approx(history[1], rel=2e-3)
    again = trained("again", FusedAdam, ORTModule, adam_w_mode=AdamWMode.ADAMW_TORCH)
    again.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-3"))
    assert [e["loss"] for e in again.state.log_history if "loss" in e] == pytest.approx(history[1], rel=2e-3)


def test_averaged_weights():
    """SWA: its schedule, its averages, its statistics of batch norm."""
    found = []
    for make in (fused, lambda p: torch.optim.AdamW(p, **SETTINGS)):
        model = net()
        model[0] = nn.Linear(4, 16, bias=False)  # it would have no gradient but rounding
        model.insert(1, nn.BatchNorm1d(16))
        optimizer = make(model.parameters())
        averaged = torch.optim.swa_utils.AveragedModel(model)
        decayed = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
        for i in range(6):
            x, y = rows(i)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            averaged.update_parameters(model)
            decayed.update_parameters(model)
            schedule.step()
        torch.optim.swa_utils.update_bn([rows(i)[0] for i in range(3)], averaged)
        found.append(
            [optimizer.param_groups[0]["lr"], *averaged.parameters(), *decayed.parameters(), *averaged.buffers()]
        )
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_hooks():
    """All hooks of an optimizer fire, those that replace what passes through them included."""
    model = net()
    optimizer, fired = fused(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: fired.append("step"))
    optimizer.register_step_post_hook(lambda *_: fired.append("stepped"))
    optimizer.register_state_dict_pre_hook(lambda *_: fired.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 7})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda *_: fired.append("loaded"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["note"] == 7
    optimizer.load_state_dict(saved)
    assert fired == ["step", "stepped", "save", "loaded"]
    everywhere = register_optimizer_step_post_hook(lambda *_: fired.append("any optimizer"))
    optimizer.step()
    everywhere.remove()
    assert fired[4:] == ["step", "stepped", "any optimizer"]


def test_wrong_states():
    model = net()
    optimizer = fused(model.parameters())
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(), other.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="not the state of a FusedAdam: a group has no betas"):
        optimizer.load_state_dict(other.state_dict())
    wrong = copy.deepcopy(before)
    del wrong["state"][1]["step"]
    with pytest.raises(ValueError, match=r"not the state of a FusedAdam: it has \['exp_avg', 'exp_avg_sq'\], no step"):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    wrong["state"][1]["exp_avg"] = None
    with pytest.raises(ValueError, match="exp_avg is None in the state dict"):
        optimizer.load_state_dict(wrong)
    wrong = copy.deepcopy(before)
    wrong["state"][1]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"exp_avg_sq is of shape \[3\] in the state dict, its parameter of \[16\]"):
        optimizer.load_state_dict(wrong)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(fused(model[0].parameters()).state_dict())
    for key, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value)
