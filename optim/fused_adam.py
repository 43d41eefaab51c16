"""Adam in one pass over the memory of all tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any

import torch
from torch.optim import Optimizer

from ortmodule import _core


class AdamWMode(IntEnum):
    """Where the weights decay."""

    ADAM_L2_REGULARIZATION = 0  #: in the gradient, as `torch.optim.Adam`
    ADAMW_TRANSFORMERS = 1  #: in the weight after the update, as the AdamW that transformers had
    ADAMW_TORCH = 2  #: in the weight before the update, as `torch.optim.AdamW`


_DEFAULTS = {
    "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6,
    "adam_w_mode": AdamWMode.ADAMW_TRANSFORMERS, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
    "master_weights": False,
}  # fmt: skip
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class FusedAdam(Optimizer):
    """Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019), all tensors in one pass over memory.

    A ``torch.optim.Optimizer``: groups, closures, hooks, schedulers and `GradScaler` work as with `torch.optim.AdamW`,
    and a state dict of either can be loaded into the other.

    Args:
        params: parameters or groups of them; float32, float64, bfloat16 or float16, on the CPU.
        lr: learning rate, a number or a tensor of one.
        bias_correction: divide the running means by 1 - beta^step.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: an :class:`AdamWMode` or its number.
        weight_decay: the decay, see :class:`AdamWMode`.
        set_grad_none: what :meth:`zero_grad` does by default: set gradients to None, or fill them with zeros.
        amsgrad: use the largest second moment so far (Reddi, Kale and Kumar, 2018).
        maximize: go up instead of down.
        master_weights: keep float32 weights, and float32 states, for 16-bit parameters.

    Raises:
        ValueError: a setting is out of its range, or there are no parameters.
        TypeError: a parameter is not of a float type.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and the test for overflow to `step`

    def __init__(
        self, params: Iterable, lr: float | torch.Tensor = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        adam_w_mode: int = AdamWMode.ADAMW_TRANSFORMERS, weight_decay: float = 0.0, set_grad_none: bool = True, *,
        amsgrad: bool = False, maximize: bool = False, master_weights: bool = False,
    ) -> None:  # fmt: skip
        self.set_grad_none = set_grad_none
        self._factor = 1.0  # of the gradients, until the next step
        given = (lr, bias_correction, betas, eps, adam_w_mode, weight_decay, amsgrad, maximize, master_weights)
        super().__init__(params, dict(zip(_DEFAULTS, given, strict=True)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("set_grad_none", True)
        self._factor = 1.0
        for group in self.param_groups:  # of another optimizer's state dict, they know less
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a FusedAdam, or of `torch.optim.Adam` or `AdamW` in the matching mode.

        Raises ValueError, with nothing changed, for the state of another optimizer or of other parameters.
        """
        saved = [p for group in state_dict["param_groups"] for p in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, mine, strict=False):  # how many they must be, PyTorch says
            if state_dict["state"].get(key):
                _check_state(state_dict["state"][key], p)
        super().load_state_dict(state_dict)
        # PyTorch casts states to the type of their parameter: those of float32 weights stay as they were.
        ours = [(group, p) for group in self.param_groups for p in group["params"]]
        for key, (group, p) in zip(saved, ours, strict=True):
            if group["master_weights"] and key in state_dict["state"]:
                for name, value in state_dict["state"][key].items():
                    if name != "step" and isinstance(value, torch.Tensor):
                        self.state[p][name] = value.to(device=p.device, dtype=torch.float32, copy=True)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """``set_to_none``: as `torch.optim.Optimizer.zero_grad`; by default what ``set_grad_none`` says."""
        self._factor = 1.0
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clips the norm of all gradients at the next step, as `torch.nn.utils.clip_grad_norm_` does at once.

        Gradients are read once here, and scaled while the step reads them: they are not written. Returns their norm
        before, a float32 scalar.

        Raises RuntimeError for a norm that is not finite, if ``error_if_nonfinite``.
        """
        grads = [_dense(p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = math.sqrt(sum(_core.sums_of_squares(grads)))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm}: it cannot be clipped")
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:  # NaN as well
            self.scale_gradients(factor)
        return torch.tensor(norm, dtype=torch.float32)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients by ``factor`` while the next step reads them; they are not written."""
        self._factor *= float(factor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clear_gradients: bool = False) -> Any:
        """One update. ``closure``: computes the loss again, which is returned. ``clear_gradients``: leave zeros behind.

        Raises RuntimeError for a sparse gradient, ValueError for one of another device or shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self._factor = self._factor, 1.0
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if overflow is not None and float(overflow) != 0:
            return loss
        if scale is not None:
            factor /= float(scale)
        for group in self.param_groups:
            self._step_group(group, factor, clear_gradients)
        return loss

    def _step_group(self, group: dict[str, Any], factor: float, clear: bool) -> None:
        rows, changed, copies = [], [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            _check_gradient(p)
            param, grad = _dense(p), p.grad
            if param is not p:
                copies.append((p, param))
            if grad.stride() != param.stride():
                grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
                if clear:
                    p.grad.zero_()
            state = self._state_of(p, param, group)
            rows.append(
                (
                    param.detach(), grad.detach(), state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq"),
                    state.get("exact"), state["step"],
                )
            )  # fmt: skip
            changed.append(p)
        if not rows:
            return
        _core.adam(
            rows, int(group["adam_w_mode"]), float(group["lr"]), *map(float, group["betas"]), float(group["eps"]),
            float(group["weight_decay"]), factor, group["bias_correction"], group["maximize"], clear,
        )  # fmt: skip
        for p, param in copies:
            p.copy_(param)
        torch.autograd.graph.increment_version(changed)  # autograd must notice that saved weights have changed

    def _state_of(self, p: torch.Tensor, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        exact = group["master_weights"] and p.dtype in (torch.bfloat16, torch.float16)
        if not state:
            dtype = torch.float32 if exact else p.dtype
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        if not isinstance(state["step"], torch.Tensor):  # of an old state dict
            state["step"] = torch.tensor(float(state["step"]))
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        if exact and "exact" not in state:
            state["exact"] = param.float()
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exact"):  # loaded in another order of dimensions
            if name in state and state[name].stride() != param.stride():
                state[name] = torch.empty_like(param, dtype=state[name].dtype).copy_(state[name])
        return state


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy when there are gaps between its elements."""
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.contiguous()


def _check_group(group: dict[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"the learning rate is a tensor of {lr.numel()} elements, not of one")
    numbers = {"learning rate": lr, "eps": group["eps"], "weight decay": group["weight_decay"]}
    for name, value in numbers.items():
        if not (math.isfinite(value) and float(value) >= 0):
            raise ValueError(f"the {name} must be a number not below 0, not {float(value)}")
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, not {betas}")
    if group["adam_w_mode"] not in list(AdamWMode):
        raise ValueError(f"adam_w_mode must be one of {[mode.value for mode in AdamWMode]}, not {group['adam_w_mode']}")
    devices = sorted({str(p.device) for p in group["params"]})
    if len(devices) > 1:
        raise ValueError(f"a group's parameters are on one device, not on {' and '.join(devices)}")
    if devices and devices != ["cpu"]:
        raise ValueError(f"FusedAdam runs on the CPU; these parameters are on {devices[0]}")
    for p in group["params"]:
        if p.dtype not in _FLOATS:
            raise TypeError(f"FusedAdam updates float parameters, not {p.dtype} (shape {list(p.shape)})")


def _check_state(state: dict[str, Any], p: torch.Tensor) -> None:
    for name in ("step", "exp_avg", "exp_avg_sq"):
        if name not in state:
            raise ValueError(f"this is not the state of an Adam: it has {sorted(state)}, no {name}")
    for name, value in state.items():
        if name != "step" and isinstance(value, torch.Tensor) and value.shape != p.shape:
            raise ValueError(
                f"{name} is of shape {list(value.shape)} in the state dict, its parameter of {list(p.shape)}"
            )


def _check_gradient(p: torch.Tensor) -> None:
    grad = p.grad
    if grad.layout is not torch.strided:
        raise RuntimeError(f"FusedAdam does not take sparse gradients (parameter of shape {list(p.shape)})")
    if grad.device != p.device:
        raise ValueError(f"a gradient is on {grad.device}, its parameter on {p.device}")
