"""FP16_Optimizer on stand-ins for the optimizers of DeepSpeed, Apex and Megatron; tests/zero has the real DeepSpeed."""

import importlib
import math
import types
import warnings

import pytest
import torch
from torch import nn

from ortmodule.optim import AdamWMode, FP16_Optimizer, FusedAdam
from ortmodule.optim.replace import fits, square_sums


def gradients(dtype=torch.float32, bad=None):
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(n, generator=generator).to(dtype) for n in (5, 4000, 0, 1)]
    if bad is not None:
        made[1][77] = bad
    return made


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


class ZeRO:
    """Speaks as stages 1 and 2 do: the check returns a tensor of one bool, the norm a float32 scalar, -1 if there is
    none."""

    clip, scale = 0.5, 8.0

    def __init__(self, optimizer, parts):
        self.optimizer, self.parts = optimizer, parts
        self.averaged_gradients = {}
        self.looked_at = []  # numbers of elements

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def has_overflow_partitioned_grads_serial(self):
        count = torch.zeros(1)
        for group in self.averaged_gradients.values():
            for g in group:
                self.looked_at.append(g.numel())
                count += 0 if g.numel() == 0 else float(not torch.isfinite(g).all())
        return count.bool()

    def get_grad_norm_direct(self, gradients, params, norm_type=2):
        norms = []
        for g in gradients:
            if not getattr(g, "_zero_padding", False):
                self.looked_at.append(g.numel())
                norms.append(g.double().norm(norm_type))
        total = torch.stack(norms).pow(norm_type).sum().pow(1 / norm_type).float()
        return total if total.isfinite() else torch.tensor(-1.0)

    def unscale_and_clip_grads(self, grad_groups_flat, total_norm):
        factor = torch.clamp((total_norm / self.scale + 1e-6) / self.clip, min=1.0) * self.scale
        for g in grad_groups_flat:
            g.mul_(1.0 / factor)

    def step(self):
        self.overflow = bool(self.has_overflow_partitioned_grads_serial())
        self.norm = self.get_grad_norm_direct(self.averaged_gradients[0], self.parts)
        if self.overflow or self.norm < 0:
            return
        for p, g in zip(self.parts, self.averaged_gradients[0], strict=True):
            p.grad = g.float()
            self.unscale_and_clip_grads([p.grad], self.norm)
            groups, self.optimizer.param_groups = self.optimizer.param_groups, [{**self.param_groups[0], "params": [p]}]
            self.optimizer.step()
            self.optimizer.param_groups = groups


ZeRO.__module__ = "deepspeed.runtime.zero.stage_1_and_2"


def zero(cls=ZeRO, make=None):
    parts = [nn.Parameter(torch.ones_like(g)) for g in gradients()]
    make = make or (lambda p: FusedAdam(p, lr=0.1, adam_w_mode=AdamWMode.ADAMW_TORCH))
    return cls(make(parts), parts)


def test_zero_reads_every_gradient_once():
    ours, theirs = zero(), zero()
    assert FP16_Optimizer(ours) is ours
    for i, bad in enumerate([None, None, math.nan, None, -math.inf, None]):
        for optimizer in (ours, theirs):
            optimizer.looked_at.clear()
            optimizer.averaged_gradients = {0: gradients(torch.bfloat16, bad)}
            optimizer.step()
        assert ours.overflow == theirs.overflow == (bad is not None)
        assert torch.equal(ours.norm, theirs.norm) and type(ours.norm) is type(theirs.norm)
        assert i == 0 or max(ours.looked_at) == 1
        assert max(theirs.looked_at) == 4000
        for p, q in zip(ours.parts, theirs.parts, strict=True):
            assert torch.equal(p, q)


def test_zero_outside_of_a_step():
    """Nothing is remembered there, gradients are written as they were."""
    ours = zero()
    FP16_Optimizer(ours)
    grads = gradients()
    ours.averaged_gradients = {0: grads}
    for _ in range(3):
        grads[1].data.mul_(2.0)
        expected = torch.cat(grads).double().norm().float()
        torch.testing.assert_close(ours.get_grad_norm_direct(grads, None), expected)
        torch.testing.assert_close(ours.get_grad_norm_direct(grads, None, 1), torch.cat(grads).abs().sum())
        assert ours.has_overflow_partitioned_grads_serial().tolist() == [False]
    grads[1]._zero_padding = True
    found = ours.get_grad_norm_direct(grads, None)
    torch.testing.assert_close(found, torch.cat([grads[0], grads[3]]).double().norm().float())
    before = grads[0].clone()
    ours.unscale_and_clip_grads([grads[0]], torch.tensor(0.0))
    assert torch.equal(grads[0], before / 8) and ours.optimizer._factor == 1.0


def test_zero_with_hooks_and_other_optimizers():
    """Who looks at the gradients before the step finds them unscaled."""
    seen = []
    for make in (FusedAdam, torch.optim.AdamW):
        ours = zero(make=make)
        if make is FusedAdam:
            ours.optimizer.register_step_pre_hook(
                lambda o, *_: seen.append(o.param_groups[0]["params"][0].grad.clone())
            )
        FP16_Optimizer(ours)
        ours.averaged_gradients = {0: gradients()}
        ours.step()
        assert all(float(p.grad.abs().max()) < 0.5 for p in ours.parts if p.numel())
    assert len(seen) == 4 and float(seen[1].norm()) < 0.5


def test_zero_that_means_something_else():
    class Other(ZeRO):
        def has_overflow_partitioned_grads_serial(self):
            return [super().has_overflow_partitioned_grads_serial(), max(g.numel() for g in self.averaged_gradients[0])]

    Other.__module__ = ZeRO.__module__
    ours = zero(Other)
    FP16_Optimizer(ours)
    ours.averaged_gradients = {0: gradients()}
    with pytest.warns(UserWarning, match="has_overflow_partitioned_grads_serial is not what"):
        assert ours.has_overflow_partitioned_grads_serial()[1] == 4000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.has_overflow_partitioned_grads_serial()[1] == 4000


def test_accelerate_wraps_it():
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)  # its wrappers ask for one
    # (accelerate.utils has it only if DeepSpeed is found when it is imported first.)
    wrapper = importlib.import_module("accelerate.utils.deepspeed").DeepSpeedOptimizerWrapper
    inner = zero()
    outer = wrapper(inner)
    assert FP16_Optimizer(outer) is outer
    assert "get_grad_norm_direct" in vars(inner)


# --- Apex -------------------------------------------------------------------------------------------------------------


class Scaler:
    """Apex's scaler of a loss."""

    def __init__(self, scale=16.0):
        self._loss_scale, self._overflow_buf, self.calls = scale, torch.zeros(1, dtype=torch.int), 0

    def loss_scale(self):
        return self._loss_scale

    def unscale(self, scaled, exact):
        self.calls += 1
        for half, whole in zip(scaled, exact, strict=True):
            whole.copy_(half.float() / self._loss_scale)
            if not torch.isfinite(whole).all():
                self._overflow_buf.fill_(1)


def apex(model):
    """An optimizer as `amp.initialize(..., opt_level="O2")` leaves it."""
    halves = [p for p in model.parameters() if p.dtype == torch.float16]
    wholes = [nn.Parameter(p.detach().float()) for p in halves]
    others = [p for p in model.parameters() if p.dtype == torch.float32]
    optimizer = torch.optim.SGD(wholes + others, lr=0.1)
    optimizer._amp_stash = types.SimpleNamespace(
        all_fp16_params=halves, all_fp32_from_fp16_params=wholes, all_fp32_from_fp32_params=others,
        all_fp32_from_fp32_grad_stash=[None] * len(others),
    )  # fmt: skip

    def post(self, scaler):
        pairs = [(h, w) for h, w in zip(halves, wholes, strict=True) if h.grad is not None]
        for half, whole in pairs:
            before = whole.grad
            whole.grad = torch.empty_like(whole)
            scaler.unscale([half.grad], [whole.grad])
            if before is not None:
                whole.grad += before
        scaler.unscale([p.grad for p in others], [p.grad for p in others])

    optimizer._post_amp_backward = types.MethodType(post, optimizer)
    return optimizer


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_apex(bad):
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        model[0].half(), model[2].half()
        optimizer = apex(model)
        if ours:
            assert FP16_Optimizer(optimizer) is optimizer
        scaler = Scaler()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        model[0].bias.grad[1] = model[0].bias.grad[1] if bad is None else bad
        model[2].bias.grad = None
        optimizer._post_amp_backward(scaler)
        assert scaler.calls == (0 if ours else 4)
        found.append([scaler._overflow_buf, *(p.grad for p in optimizer.param_groups[0]["params"])])
    assert found[0][0].item() == found[1][0].item() == (bad is not None)
    torch.testing.assert_close(found[0], found[1], equal_nan=True)
    optimizer = apex(model)
    FP16_Optimizer(optimizer)
    optimizer._amp_stash.all_fp32_from_fp16_params[0].grad = torch.ones(8, 4)  # of an earlier backward: Apex adds
    optimizer._post_amp_backward(scaler)
    expected = 1 + model[0].weight.grad.float() / 16
    torch.testing.assert_close(optimizer._amp_stash.all_fp32_from_fp16_params[0].grad, expected, equal_nan=True)


# --- Megatron ---------------------------------------------------------------------------------------------------------


class Megatron:
    def __init__(self, halves, wholes):
        self.optimizer = torch.optim.SGD(wholes, lr=0.1)
        self.fp16_groups, self.fp32_from_fp32_groups, self.loss_scaler = [halves], [], object()
        self.overflow, self.calls = False, 0

    def _check_overflow(self):
        self.calls += 1
        self.overflow = any(not p.grad.isfinite().all() for p in self.fp16_groups[0] if p.grad is not None)

    def clip_master_grads(self, max_norm, norm_type=2):
        self.calls += 1
        if self.overflow:
            return -1
        return float(nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], max_norm, norm_type))


def megatron(bad=None):
    halves, wholes = ([nn.Parameter(torch.ones_like(g)) for g in gradients(t)] for t in (torch.float16, torch.float32))
    for dtype, parameters in ((torch.float16, halves), (torch.float32, wholes)):
        for p, g in zip(parameters, gradients(dtype, bad if dtype == torch.float16 else None), strict=True):
            p.grad = g
    return Megatron(halves, wholes)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_megatron(bad):
    ours, theirs = megatron(bad), megatron(bad)
    assert FP16_Optimizer(ours, get_horizontal_model_parallel_rank=lambda: 0) is ours
    for most in (1e6, 1.0):
        for optimizer in (ours, theirs):
            optimizer._check_overflow()
        assert ours.overflow is theirs.overflow is (bad is not None)
        found, expected = ours.clip_master_grads(most), theirs.clip_master_grads(most)
        assert type(found) is type(expected) and found == pytest.approx(expected, rel=1e-6)
    for a, b in zip(*(o.optimizer.param_groups[0]["params"] for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert ours.calls == 0 and theirs.calls == 4
    if bad is None:
        assert ours.clip_master_grads(1e9, 1) == pytest.approx(theirs.clip_master_grads(1e9, 1)) and ours.calls == 1


def test_megatron_counts_what_is_on_every_rank_once():
    ours = megatron()
    FP16_Optimizer(ours, get_horizontal_model_parallel_rank=lambda: 1)
    parameters = ours.optimizer.param_groups[0]["params"]
    parameters[1].model_parallel = True
    assert ours.clip_master_grads(1e9) == pytest.approx(float(parameters[1].grad.norm()), rel=1e-6)


# --- all --------------------------------------------------------------------------------------------------------------


def test_others_stay_as_they_are():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    before = dict(vars(optimizer))
    with pytest.warns(UserWarning, match=r"does not know torch\.optim\.sgd\.SGD"):
        assert FP16_Optimizer(optimizer) is optimizer
    assert vars(optimizer) == before
    with pytest.raises(TypeError, match="no argument 'ranks'"):
        FP16_Optimizer(optimizer, ranks=2)
    fused = FusedAdam([nn.Parameter(torch.ones(2))])
    with warnings.catch_warnings():  # DeepSpeed hands it back at stage 0 in float32
        warnings.simplefilter("error")
        assert FP16_Optimizer(fused) is fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_sums(dtype, bad):
    tensors = [*gradients(dtype, bad), torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)[::2]]
    assert fits(tensors) and not fits([tensors[0].double()]) and not fits([tensors[0].to_sparse()])
    expected = [t.double().square().sum() for t in tensors]
    torch.testing.assert_close(square_sums(tensors), expected, equal_nan=True)
    assert [bool(s.isfinite()) for s in square_sums(tensors)] == [True, bad is None, True, True, True]
