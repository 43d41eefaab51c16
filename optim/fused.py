"""Shares what the fused optimizers have in common: all tensors of a step in one pass over memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from ortmodule import _core
from ortmodule.core import devices
from ortmodule.core.errors import ArgumentError, ArgumentTypeError, StateError
from ortmodule.engine.session import gpu_of, stream_of

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)


class FusedOptimizer(Optimizer, ABC):
    """A ``torch.optim.Optimizer`` whose update of a tensor is a rule of the engine (``csrc/optim``).

    A class says what its rule is called, what its state consists of, and which numbers the rule takes.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and the test for overflow to `step`

    _rule: str  #: its name in the engine
    _clipped: tuple[Any, list[tuple[torch.Tensor, int]]] | None
    _states: tuple[str, ...]  #: names of the state's tensors, in the rule's order
    _needed: tuple[str, ...]  #: what the state of a parameter that has been stepped must have
    _group_needs: tuple[str, ...]  #: what a group of a state dict must have
    _on_gpu = True  #: there are kernels of the rule
    _measures = False  #: the rule needs sums over whole tensors
    _takes_shards = True  #: an element's update depends on no other element

    def __init__(self, params: Iterable, defaults: dict[str, Any], set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        self.forget()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("set_grad_none", True)
        self.forget()
        for group in self.param_groups:  # of another optimizer's state dict, they know less
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    # --- what a class says ----------------------------------------------------------------------------------------

    @abstractmethod
    def _check_settings(self, group: dict[str, Any]) -> None:
        """Raises ValueError, or TypeError for what is no number, unless the settings of a group make sense."""

    def _used(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the state's tensors that a group's settings need, the first few of ``_states``."""
        return self._states

    @abstractmethod
    def _fill(self, state: dict[str, Any], param: torch.Tensor, dtype: torch.dtype, group: dict[str, Any]) -> None:
        """Puts what is missing into the state of one parameter; its tensors lie in memory as ``param`` does."""

    @abstractmethod
    def _settings(self, group: dict[str, Any], first: bool) -> tuple[float, ...]:
        """The rule's settings. ``first``: for parameters that had no state before this step."""

    # --- groups and states ----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        self._check_settings(group)
        places = sorted({str(p.device) for p in group["params"]})
        if len(places) > 1:
            raise ArgumentError(f"a group's parameters are on one device, not on {' and '.join(places)}")
        kinds = devices.TYPES if self._on_gpu else ("cpu",)
        if places and places[0].partition(":")[0] not in kinds:
            raise ArgumentError(f"{name} runs on {' and '.join(kinds)}; these parameters are on {places[0]}")
        refusal = devices.refusal([("a parameter", p) for p in group["params"]])
        if refusal is not None:
            raise ArgumentError(f"{name} cannot run: {refusal}")
        for p in group["params"]:
            if p.dtype not in FLOATS:
                raise ArgumentTypeError(f"{name} updates float parameters, not {p.dtype} (shape {list(p.shape)})")
            if hasattr(p, "to_local") and not self._takes_shards:
                raise ArgumentError(f"{name} needs whole parameters, no shards (DTensor, shape {list(p.shape)})")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this class, or of the class of `torch.optim` that it equals.

        Raises ValueError, with nothing changed, for the state of another optimizer or of other parameters, and for
        settings that the constructor refuses.
        """
        groups = state_dict["param_groups"]
        for group in groups:
            self._check_saved_group(group)
        saved = [p for group in groups for p in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, mine, strict=False):  # how many they must be, PyTorch says
            if state_dict["state"].get(key):
                self._check_state(state_dict["state"][key], p)
        super().load_state_dict(state_dict)
        # PyTorch casts states to the type of their parameter: those of float32 weights stay as they were.
        ours = [(group, p) for group in self.param_groups for p in group["params"]]
        for key, (group, p) in zip(saved, ours, strict=True):
            if group["master_weights"] and key in state_dict["state"]:
                for name, value in state_dict["state"][key].items():
                    if name != "step" and isinstance(value, torch.Tensor):
                        self.state[p][name] = value.to(device=p.device, dtype=torch.float32, copy=True)

    def _check_saved_group(self, group: dict[str, Any]) -> None:
        missing = [name for name in self._group_needs if name not in group]
        if missing:
            raise ArgumentError(f"this is not the state of a {type(self).__name__}: a group has no {missing[0]}")
        self._check_settings(self.defaults | group)

    def _check_state(self, state: dict[str, Any], p: torch.Tensor) -> None:
        for name in self._needed:
            if name not in state:
                raise ArgumentError(
                    f"this is not the state of a {type(self).__name__}: it has {sorted(state)}, no {name}"
                )
        for name, value in state.items():
            if name == "step":
                continue
            if name in self._needed and not isinstance(value, torch.Tensor):
                raise ArgumentError(f"{name} is {value!r} in the state dict, no tensor")
            if isinstance(value, torch.Tensor) and value.shape != p.shape:
                raise ArgumentError(
                    f"{name} is of shape {list(value.shape)} in the state dict, its parameter of {list(p.shape)}"
                )

    def _state_of(self, p: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        exact = _has_exact(p, group)
        param = _dense(p)
        self._fill(state, param, torch.float32 if exact else p.dtype, group)
        if exact and "exact" not in state:
            state["exact"] = param.detach().float()
        for name in (*self._states, "exact"):  # loaded in another order of dimensions
            value = state.get(name)
            if value is not None and value.stride() != param.stride():
                state[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
        return state

    # --- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """``set_to_none``: as `torch.optim.Optimizer.zero_grad`; by default what ``set_grad_none`` says."""
        self.forget()
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def clip_grad_norm(self, max_norm: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Clips the norm of all gradients at the next step, as `torch.nn.utils.clip_grad_norm_` does at once.

        Gradients are read once here, and scaled while the step reads them: they are not written. Returns their norm
        before, a float32 scalar; of shards (DTensor) the norm of the whole, by a collective. On a GPU nothing waits for
        it, unless ``error_if_nonfinite``.

        Raises RuntimeError for a norm that is not finite, if ``error_if_nonfinite``, and for a sparse gradient.
        """
        grads = self._gradients()
        so_far = self._factor * self._clip_factor()
        norm = _root(self._sum_of_squares(grads)) * (so_far.abs() if isinstance(so_far, torch.Tensor) else abs(so_far))
        if error_if_nonfinite and not math.isfinite(norm):
            raise StateError(f"the norm of the gradients is {float(norm)}: it cannot be clipped")
        factor = max_norm / (norm + 1e-6)
        if isinstance(factor, torch.Tensor):
            factor = factor.clamp(max=1.0)
        if isinstance(factor, torch.Tensor) or not factor >= 1.0:  # NaN as well
            self._clipped = (so_far / self._factor * factor, [(g, g._version) for g in grads])
        return norm.float() if isinstance(norm, torch.Tensor) else torch.tensor(norm, dtype=torch.float32)

    def _sum_of_squares(self, gradients: list[Any]) -> float | torch.Tensor:
        """A number, or on a GPU a float64 scalar there; of shards what all of them have together."""
        total = self._sum([g for g in gradients if not hasattr(g, "to_local")])
        kinds: dict[Any, list[Any]] = {}
        for g in gradients:
            if hasattr(g, "to_local"):
                kinds.setdefault((g.device_mesh, g.placements), []).append(g)
        for (mesh, placements), shards in kinds.items():
            from torch.distributed.tensor import DTensor, Partial, Replicate

            if any(placement.is_partial() for placement in placements):  # a sum that is still to be taken
                placements = [Replicate()] * len(placements)
                shards = [g.redistribute(placements=placements) for g in shards]
            mine = torch.as_tensor(self._sum([g.to_local() for g in shards]), dtype=torch.float64)
            added = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            whole = DTensor.from_local(mine, mesh, added).full_tensor()
            total = total + (whole if self._gpu(whole) else whole.item())
        return total

    def _gpu(self, tensor: torch.Tensor) -> torch.device | None:
        return gpu_of([tensor]) if self._on_gpu else None

    def _sum(self, tensors: list[torch.Tensor]) -> float | torch.Tensor:
        total: float | torch.Tensor = 0.0
        places: dict[torch.device | None, list[torch.Tensor]] = {}
        for t in tensors:
            places.setdefault(self._gpu(t), []).append(_dense(t.detach()))
        for gpu, there in places.items():
            if gpu is None:
                total = total + sum(_core.sums_of_squares(there))
                continue
            sums, room = torch.empty(len(there), dtype=torch.float64, device=gpu), _room(len(there), gpu)
            _core.cuda_sums_of_squares(there, sums, room, gpu.index or 0, stream_of(gpu))
            here = sums.sum()
            total = here + (total.to(gpu) if isinstance(total, torch.Tensor) else total)
        return total

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients by ``factor`` while the next step reads them; they are not written."""
        self._factor *= float(factor)

    def forget(self) -> None:
        """The gradients are not going to be used, so what was to be done to them is not to be done to others."""
        self._factor = 1.0  # of the gradients that the next step reads
        #: A further factor, of these gradients alone.
        self._clipped: tuple[float | torch.Tensor, list[tuple[torch.Tensor, int]]] | None = None

    def _gradients(self) -> list[torch.Tensor]:
        grads = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, grad in grads:
            self._check_gradient(p, grad)
        return [g for _, g in grads]

    def _clip_factor(self) -> float | torch.Tensor:
        """What :meth:`clip_grad_norm` has found for the gradients that are there now."""
        if self._clipped is None:
            return 1.0
        factor, clipped = self._clipped
        versions = {id(g): version for g, version in clipped}
        now = [versions.get(id(g)) == g._version for g in self._gradients()]
        if all(now):
            return factor
        if not any(id(g) in versions for g in self._gradients()):  # they were dropped, these are others
            return 1.0
        raise StateError(
            "gradients were changed after clip_grad_norm, which clips at the step: call it when they are complete"
        )

    def _check_gradient(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            raise StateError(
                f"{type(self).__name__} does not take sparse gradients (parameter of shape {list(p.shape)})"
            )
        if grad.device != p.device:
            raise ArgumentError(f"a gradient is on {grad.device}, its parameter on {p.device}")

    # --- the step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clear_gradients: bool = False) -> Any:
        """One update. ``closure``: computes the loss again, which is returned. ``clear_gradients``: leave zeros behind.

        Raises, with nothing changed, RuntimeError for a sparse gradient, ValueError for one of another device and for
        a learning rate that is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._gradients()  # are looked at before anything changes
        factor = self._factor * self._clip_factor()
        self.forget()
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            lr = group["lr"]
            if not _is_there(lr) and not math.isfinite(lr):
                raise ArgumentError(f"the learning rate must be a number, not {float(lr)}")
        for group in self.param_groups:
            gpu = self._place(group)
            if gpu is not None:
                self._step_group(group, factor, clear_gradients, (gpu, scale, overflow))
            elif overflow is None or float(overflow) == 0:
                unscale = 1.0 if scale is None else 1.0 / float(scale)
                self._step_group(group, float(factor) * unscale, clear_gradients)
            elif clear_gradients:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.zero_()
        return loss

    def _place(self, group: dict[str, Any]) -> torch.device | None:
        """The GPU that a group's step runs on, or None."""
        return self._gpu(group["params"][0]) if group["params"] else None

    def _step_group(
        self,
        group: dict[str, Any],
        factor: float | torch.Tensor,
        clear: bool,
        there: tuple[torch.device, Any, Any] | None = None,
    ) -> None:
        """``there``: a GPU, and the scale and the overflow that are on it."""
        rows: dict[bool, list[tuple]] = {True: [], False: []}  # those of parameters that had no state, and the others
        changed, copies = [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            used = self._used(group)
            first = all(self.state[p].get(name) is None for name in used)
            state = self._state_of(p, group)
            param, grad = _local(p), _local(p.grad, p)
            dense = _dense(param)
            if dense is not param:
                copies.append((param, dense))
            if grad.stride() != dense.stride():
                grad = torch.empty_like(dense, dtype=grad.dtype).copy_(grad)
                if clear:
                    p.grad.zero_()
            exact = state["exact"] if _has_exact(p, group) else None
            tensors = [None if t is None else _local(t) for t in (exact, *map(state.get, used))]
            rows[first].append((dense.detach(), grad.detach(), state.get("step"), *tensors))
            changed.append(p)
        place = None
        if there is not None:
            count = max(map(len, rows.values())) if self._measures else 0
            place, group, factor = _arguments(*there, group, factor, count)
        factor = -factor if group["maximize"] else factor
        for first, together in rows.items():
            if together:
                _core.optimize(self._rule, together, self._settings(group, first), float(factor), clear, place)
        for param, dense in copies:
            param.copy_(dense)
        if changed:
            torch.autograd.graph.increment_version(changed)  # autograd must notice that saved weights have changed


def _has_exact(p: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether float32 weights are kept for a parameter."""
    return bool(group["master_weights"]) and p.dtype in NARROW


def _local(tensor: Any, like: Any = None) -> torch.Tensor:
    """The shard of a DTensor that this process has; ``like``: cut as this one is. Other tensors as they are."""
    if not hasattr(tensor, "to_local"):
        return tensor
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy when there are gaps between its elements."""
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.contiguous()


def _arguments(
    gpu: torch.device, scale: Any, overflow: Any, group: dict[str, Any], factor: float | torch.Tensor, measured: int
) -> tuple[tuple, dict[str, Any], float]:
    """What a step on a GPU reads there, and what is left for the host to say: the place, the group, the factor.

    ``measured``: of how many tensors it needs sums.
    """

    def at(value: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
        return value.detach().to(gpu, dtype) if isinstance(value, torch.Tensor) else None

    lr = group["lr"] if isinstance(group["lr"], torch.Tensor) and group["lr"].device.type == gpu.type else None
    place = (
        gpu.index or 0, stream_of(gpu), at(lr, None), at(scale, torch.float32), at(overflow, torch.float32),
        at(factor, torch.float64), _room(measured * 2, gpu) if measured else None,
    )  # fmt: skip
    known = group if lr is None else {**group, "lr": 0.0}
    return place, known, 1.0 if isinstance(factor, torch.Tensor) else factor


def _room(sums: int, gpu: torch.device) -> torch.Tensor:
    """Where the parts of so many sums are kept until they are added up."""
    return torch.empty(sums * _core.cuda_sum_parts, dtype=torch.float64, device=gpu)


def _is_there(value: Any) -> bool:
    """Whether a number is on a GPU, where the host would have to wait for it."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _root(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.sqrt() if isinstance(value, torch.Tensor) else math.sqrt(value)


# --- settings ---------------------------------------------------------------------------------------------------------


def check_numbers(group: dict[str, Any], **names: str) -> None:
    """Settings that are numbers, or tensors of one, not below 0; ``names``: what a sentence calls each of them."""
    for setting, name in names.items():
        value = group[setting]
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ArgumentError(f"the {name} is a tensor of {value.numel()} elements, not of one")
        if not isinstance(value, (int, float, torch.Tensor)) and not hasattr(value, "__float__"):
            raise ArgumentTypeError(f"the {name} must be a number, not {value!r}")
        if not (math.isfinite(value) and float(value) >= 0):
            raise ArgumentError(f"the {name} must be a number not below 0, not {float(value)}")


def check_betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)):
        raise ArgumentTypeError(f"betas must be two numbers, not {betas!r}")
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ArgumentError(f"betas must be two numbers from 0 to below 1, not {betas}")


def fill_step(state: dict[str, Any], param: torch.Tensor) -> None:
    """A counter of steps, as `torch.optim` has it, where the parameter is."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    elif not isinstance(state["step"], torch.Tensor):  # of an old state dict
        state["step"] = torch.tensor(float(state["step"]), device=param.device)
    elif state["step"].device != param.device:  # `torch.optim` has it on either
        state["step"] = state["step"].to(param.device)


def fill_zeros(state: dict[str, Any], param: torch.Tensor, dtype: torch.dtype, *names: str) -> None:
    for name in names:
        if state.get(name) is None:
            state[name] = torch.zeros_like(param, dtype=dtype)
