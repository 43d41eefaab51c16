"""Describes optimizers for ORTTrainer: settings for all parameters, and for groups of them by name."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

from torch import nn

from ortmodule.core.errors import ArgumentError, ArgumentTypeError
from ortmodule.optim.fused import FusedOptimizer
from ortmodule.optim.fused_adam import AdamWMode, FusedAdam
from ortmodule.optim.fused_lamb import FusedLamb
from ortmodule.optim.fused_sgd import FusedSGD


class OptimizerConfig(ABC):
    """What :class:`AdamConfig`, :class:`LambConfig` and :class:`SGDConfig` have in common.

    ``params``: groups, as ``[{"params": ["layer.weight"], "lr": 0.1}]``: names of parameters, and settings that are
    others for these. ``defaults``: the settings of all. Both are read when a trainer is made.

    Raises TypeError for a group that is none, ValueError for a setting that the optimizer does not have.
    """

    optimizer: ClassVar[type[FusedOptimizer]]

    def __init__(self, params: Iterable[Mapping[str, Any]], max_norm_clip: float | None, **defaults: Any) -> None:
        self.params, self.defaults, self.max_norm_clip = [dict(group) for group in params], defaults, max_norm_clip
        self.lr = float(defaults["lr"])
        vars(self).update({name: value for name, value in defaults.items() if name != "lr"})
        if max_norm_clip is not None and not max_norm_clip > 0:
            raise ArgumentError(f"max_norm_clip must be above 0, not {max_norm_clip}")
        for group in self.params:
            names = group.get("params")
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise ArgumentTypeError(f"a group of parameters has a list of names as 'params', not {names!r}")
            for name in group:
                if name != "params" and name not in defaults:
                    raise ArgumentError(f"{type(self).__name__} has no setting {name}{_nearest(name, defaults)}")

    @abstractmethod
    def _settings(self, values: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's names for settings."""

    def groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Groups for the optimizer: first the parameters that no group names, then the groups.

        Raises ValueError for the name of no parameter, of one that is in two groups, or of one that is frozen.
        """
        named = dict(module.named_parameters(remove_duplicate=False))
        taken: dict[int, str] = {}
        named_groups = []
        for group in self.params:
            for name in group["params"]:
                if name not in named:
                    raise ArgumentError(f"the module has no parameter {name}{_nearest(name, named)}")
                if not named[name].requires_grad:
                    raise ArgumentError(f"the parameter {name} is in a group of the optimizer, and frozen")
                if id(named[name]) in taken:
                    raise ArgumentError(f"the parameter {name} is in two groups of the optimizer")
                taken[id(named[name])] = name
            own = {name: value for name, value in group.items() if name != "params"}
            parameters = [named[name] for name in group["params"]]
            named_groups.append({"params": parameters, **self._settings(self.defaults | own)})
        rest = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
        first = [{"params": rest, **self._settings(self.defaults)}] if rest else []
        if not first and not named_groups:
            raise ArgumentError("the module has no parameters to train")
        return first + named_groups


def _nearest(word: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {found[0]}?" if found else ""


class AdamConfig(OptimizerConfig):
    """Adam and AdamW: a :class:`FusedAdam`.

    Args:
        params: groups with settings of their own, ``[{"params": [name, ...], "lambda_coef": 0.0}]``.
        lr: learning rate.
        alpha, beta: decay rates of the running means of the gradient and of its square.
        lambda_coef: weight decay.
        epsilon: added to the denominator.
        max_norm_clip: the largest norm that all gradients together may have; None: any.
        do_bias_correction: divide the running means by 1 - beta^step.
        weight_decay_mode: a :class:`AdamConfig.DecayMode`.
    """

    class DecayMode(IntEnum):
        """When weights decay."""

        BEFORE_WEIGHT_UPDATE = 0  #: as `torch.optim.AdamW`
        AFTER_WEIGHT_UPDATE = 1  #: as the AdamW that transformers had

    optimizer = FusedAdam

    def __init__(
        self, params: Iterable[Mapping[str, Any]] = (), lr: float = 0.001, alpha: float = 0.9, beta: float = 0.999,
        lambda_coef: float = 0.0, epsilon: float = 1e-8, max_norm_clip: float | None = 1.0,
        do_bias_correction: bool = True, weight_decay_mode: DecayMode | int = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:  # fmt: skip
        super().__init__(
            params, max_norm_clip, lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef, epsilon=epsilon,
            do_bias_correction=do_bias_correction, weight_decay_mode=weight_decay_mode,
        )  # fmt: skip

    def _settings(self, values: dict[str, Any]) -> dict[str, Any]:
        before = self.DecayMode(values["weight_decay_mode"]) == self.DecayMode.BEFORE_WEIGHT_UPDATE
        return {
            "lr": values["lr"], "betas": (values["alpha"], values["beta"]), "eps": values["epsilon"],
            "weight_decay": values["lambda_coef"], "bias_correction": values["do_bias_correction"],
            "adam_w_mode": int(AdamWMode.ADAMW_TORCH if before else AdamWMode.ADAMW_TRANSFORMERS),
        }  # fmt: skip


class LambConfig(OptimizerConfig):
    """LAMB: a :class:`FusedLamb`.

    Args: as of :class:`AdamConfig`; ``lambda_coef`` times the weight is added to the direction. ``ratio_min``,
    ``ratio_max``: bounds of the ratio of norms, which FusedLamb does not have.

    Raises ValueError for such a bound.
    """

    optimizer = FusedLamb

    def __init__(
        self, params: Iterable[Mapping[str, Any]] = (), lr: float = 0.001, alpha: float = 0.9, beta: float = 0.999,
        lambda_coef: float = 0.0, ratio_min: float = -math.inf, ratio_max: float = math.inf, epsilon: float = 1e-6,
        max_norm_clip: float | None = 1.0, do_bias_correction: bool = True,
    ) -> None:  # fmt: skip
        if ratio_min > 0 or ratio_max != math.inf:
            raise ArgumentError(f"LAMB's ratio has no bounds here: not ratio_min {ratio_min} and ratio_max {ratio_max}")
        super().__init__(
            params, max_norm_clip, lr=lr, alpha=alpha, beta=beta, lambda_coef=lambda_coef, epsilon=epsilon,
            do_bias_correction=do_bias_correction,
        )  # fmt: skip

    def _settings(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": values["lr"], "betas": (values["alpha"], values["beta"]), "eps": values["epsilon"],
            "weight_decay": values["lambda_coef"], "bias_correction": values["do_bias_correction"],
        }  # fmt: skip


class SGDConfig(OptimizerConfig):
    """Gradient descent without momentum: a :class:`FusedSGD`. ``params``, ``lr``: as of :class:`AdamConfig`."""

    optimizer = FusedSGD

    def __init__(self, params: Iterable[Mapping[str, Any]] = (), lr: float = 0.001) -> None:
        super().__init__(params, None, lr=lr)

    def _settings(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"lr": values["lr"]}
