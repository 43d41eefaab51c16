"""Makes the steps of Apex AMP's optimizers cheaper at level O2: 16-bit model weights, float32 master weights."""

from __future__ import annotations

from typing import Any

import torch

from ortmodule.core.torch_private import amp_unscale, foreach_copy_
from ortmodule.optim.replace import has_method

_LISTS = ("all_fp16_params", "all_fp32_from_fp16_params", "all_fp32_from_fp32_params")


def knows(optimizer: Any) -> bool:
    """Apex puts `_amp_stash` and its methods onto the optimizer itself."""
    stash, after = getattr(optimizer, "_amp_stash", None), getattr(optimizer, "_post_amp_backward", None)
    prepared = all(hasattr(stash, name) for name in _LISTS) or hasattr(optimizer, "_amp_lazy_init")
    return stash is not None and callable(after) and prepared


def modify(optimizer: Any, **_: Any) -> None:
    """Unscaling, conversion to float32 and the check for overflow become two calls for all gradients."""
    original = optimizer._post_amp_backward

    def _post_amp_backward(scaler: Any) -> None:
        """Called after backward, with Apex's scaler of this loss."""
        if not (_can_report(scaler) and _unscale_all(optimizer, scaler)):
            original(scaler)

    optimizer._post_amp_backward = _post_amp_backward


def _can_report(scaler: Any) -> bool:
    return has_method(scaler, "loss_scale") and isinstance(getattr(scaler, "_overflow_buf", None), torch.Tensor)


def _unscale_all(optimizer: Any, scaler: Any) -> bool:
    """False, with nothing changed, when a float32 gradient of an earlier backward is to be added to."""
    stash = optimizer._amp_stash
    if not getattr(stash, "lazy_init_called", True):
        optimizer._amp_lazy_init()
    if amp_unscale is None or not all(hasattr(stash, name) for name in _LISTS):
        return False
    pairs = list(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))
    pairs = [(half, whole) for half, whole in pairs if half.grad is not None]
    own = [p.grad for p in stash.all_fp32_from_fp32_params if p.grad is not None]
    added_to = [whole.grad for _, whole in pairs] + list(getattr(stash, "all_fp32_from_fp32_grad_stash", ()))
    if any(gradient is not None for gradient in added_to):
        return False
    scaled = [half.grad for half, _ in pairs]
    if any(gradient.layout is not torch.strided for gradient in scaled + own):
        return False
    exact = [torch.empty_like(whole) for _, whole in pairs]
    if not scaled + own:
        return True
    foreach_copy_(exact, scaled)
    found = torch.zeros(1, device=(exact + own)[0].device)
    factor = torch.full_like(found, 1.0 / scaler.loss_scale())
    amp_unscale(exact + own, found, factor)
    for (_, whole), gradient in zip(pairs, exact, strict=True):
        whole.grad = gradient
    scaler._overflow_buf.copy_(torch.maximum(scaler._overflow_buf, found.to(scaler._overflow_buf.dtype)))
    if not getattr(scaler, "has_fused_kernel", True):  # then Apex has noted the result in each call
        scaler._has_overflow = bool(scaler._overflow_buf)
    return True
