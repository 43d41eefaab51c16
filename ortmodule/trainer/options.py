"""Checks the options of ORTTrainer against one table of all that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ortmodule.core.errors import ArgumentError, ArgumentTypeError
from ortmodule.optim.loss_scaler import StaticLossScaler


@dataclass(frozen=True)
class _Option:
    """``kinds``: types that a value may have. ``only``: why a value other than the default cannot be."""

    kinds: tuple[type, ...]
    default: Any = None
    least: int | None = None
    most: int | None = None
    one_of: tuple[Any, ...] = ()
    has: str = ""  # a method that a value must have
    only: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises TypeError or ValueError unless the option ``name`` can be ``value``."""
        if isinstance(value, bool) and bool not in self.kinds or not isinstance(value, self.kinds):
            kinds = " or ".join(kind.__name__ for kind in self.kinds)
            raise ArgumentTypeError(f"the option {name} is of type {kinds}, not {value!r}")
        number: Any = value
        if self.least is not None and number is not None and number < self.least:
            raise ArgumentError(f"the option {name} must be {self.least} or more, not {number}")
        if self.most is not None and number is not None and number > self.most:
            raise ArgumentError(f"the option {name} must be {self.most} or less, not {number}")
        if self.one_of and value not in self.one_of:
            raise ArgumentError(f"the option {name} must be one of {', '.join(map(str, self.one_of))}, not {value!r}")
        if self.has and value is not None and not hasattr(value, self.has):
            raise ArgumentTypeError(f"the option {name} has a method {self.has}; {value!r} has none")
        if self.only and value != self.default:
            raise ArgumentError(f"the option {name} cannot be {value!r}: {self.only}")


_NONE = type(None)
_FLAG, _COUNT = _Option((bool,), False), _Option((int,), 1, least=1)


def _without(default: Any, why: str) -> _Option:
    return _Option((type(default),), default, only=why)


#: All options, with their defaults. Groups are dictionaries.
SCHEMA: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": _COUNT},
    "device": {"id": _Option((str, _NONE)), "mem_limit": _Option((int,), 0, least=0)},
    "distributed": {
        "world_rank": _Option((int,), 0, least=0),
        "world_size": _COUNT,
        "local_rank": _Option((int,), 0, least=0),
        "data_parallel_size": _COUNT,
        "horizontal_parallel_size": _COUNT,
        "horizontal_parallel_plan": _Option((dict,), {}),
        "pipeline_parallel_size": _COUNT,
        "num_pipeline_micro_batches": _COUNT,
        "pipeline_cut_info_string": _Option((str,), ""),
        "pipeline_parallel": {},
        "sliced_schema": _Option((dict,), {}),
        "sliced_axes": _Option((dict,), {}),
        "sliced_tensor_names": _Option((list, tuple), []),
        "allreduce_post_accumulation": _FLAG,
        "deepspeed_zero_optimization": {"stage": _Option((int,), 0, least=0, most=1)},
        "enable_adasum": _FLAG,
    },
    "lr_scheduler": _Option((object,), None, has="get_lr"),
    "mixed_precision": {
        "enabled": _FLAG,
        "dtype": _Option((str, _NONE), None, one_of=(None, "float16", "bfloat16")),
        "loss_scaler": _Option((StaticLossScaler, _NONE)),
    },
    "graph_transformer": {
        "attn_dropout_recompute": _FLAG,
        "gelu_recompute": _FLAG,
        "transformer_layer_recompute": _FLAG,
        "number_recompute_layers": _Option((int,), 0, least=0),
    },
    "utils": {
        "frozen_weights": _Option((list, tuple), ()),
        "grad_norm_clip": _Option((bool,), True),
        "memory_efficient_gradient": _FLAG,
        "invertible_layer_norm_gradient": _FLAG,
        "run_symbolic_shape_infer": _FLAG,
    },
    "seed": _Option((int, _NONE), None, least=0),
    "debug": {"deterministic_compute": _FLAG, "check_model_export": _FLAG},
    "_internal_use": {
        "enable_internal_postprocess": _Option((bool,), True),
        "extra_postprocess": _without(None, "graphs are not given to the script"),
        "onnx_opset_version": _Option((int, _NONE)),
        "enable_onnx_contrib_ops": _Option((bool,), True),
    },
}


class ORTTrainerOptions:
    """``ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 4}})``; docs/orttrainer.md lists all options.

    They are attributes: ``options.batch.gradient_accumulation_steps``. Raises ValueError for an option that does not
    exist or a value that cannot be, TypeError for a value of another type; the sentence names the option.
    """

    batch: Any
    device: Any
    distributed: Any
    lr_scheduler: Any
    mixed_precision: Any
    graph_transformer: Any
    utils: Any
    seed: int | None
    debug: Any
    _internal_use: Any

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        vars(self).update(vars(_read(options or {}, SCHEMA, "")))
        sizes = self.distributed
        if not sizes.world_rank < sizes.world_size:
            raise ArgumentError(
                f"the option distributed.world_rank is {sizes.world_rank}, of a world of {sizes.world_size}"
            )
        _check_sizes(sizes)


def _check_sizes(sizes: Any) -> None:
    """Raises ValueError where the processes cannot be divided as the options say."""
    parts = sizes.horizontal_parallel_size * sizes.pipeline_parallel_size
    if sizes.world_size % parts or sizes.data_parallel_size not in (1, sizes.world_size // parts):
        raise ArgumentError(
            f"the option distributed.data_parallel_size is {sizes.data_parallel_size}, horizontal_parallel_size "
            f"{sizes.horizontal_parallel_size} and pipeline_parallel_size {sizes.pipeline_parallel_size}, "
            f"but distributed.world_size is {sizes.world_size}: it is their product"
        )
    if sizes.horizontal_parallel_size > 1 and sizes.pipeline_parallel_size > 1:
        raise ArgumentError(
            "the options distributed.horizontal_parallel_size and pipeline_parallel_size cannot both be above 1"
        )
    for name, asked in (
        ("deepspeed_zero_optimization.stage", sizes.deepspeed_zero_optimization.stage),
        ("enable_adasum", sizes.enable_adasum),
    ):
        if parts > 1 and asked:
            raise ArgumentError(
                f"the option distributed.{name} is for processes that have the whole model, and "
                "horizontal_parallel_size or pipeline_parallel_size is above 1"
            )
    if sizes.pipeline_parallel_size == 1:
        for name in ("num_pipeline_micro_batches", "pipeline_cut_info_string", "sliced_schema", "sliced_axes",
                     "sliced_tensor_names"):  # fmt: skip
            if getattr(sizes, name) not in (1, "", {}, [], ()):
                raise ArgumentError(f"the option distributed.{name} needs distributed.pipeline_parallel_size above 1")
    if sizes.horizontal_parallel_size == 1 and sizes.horizontal_parallel_plan:
        raise ArgumentError(
            "the option distributed.horizontal_parallel_plan needs distributed.horizontal_parallel_size above 1"
        )


def _read(given: Any, schema: dict[str, Any], path: str) -> SimpleNamespace:
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(f"the option {path.rstrip('.') or 'options'} is a dictionary, not {given!r}")
    for name in given:
        if name not in schema:
            near = difflib.get_close_matches(str(name), schema, 1, 0.6)
            advice = f"; did you mean {path}{near[0]}?" if near else ""
            raise ArgumentError(f"there is no option {path}{name}{advice}")
    made = SimpleNamespace()
    for name, option in schema.items():
        if isinstance(option, dict):
            setattr(made, name, _read(given.get(name, {}), option, f"{path}{name}."))
            continue
        value = given.get(name, option.default)
        option.check(path + name, value)
        setattr(made, name, value)
    return made


def names(schema: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[str]:
    """Of all options: ``batch.gradient_accumulation_steps`` ..."""
    for name, option in schema.items():
        if isinstance(option, dict):
            yield from names(option, f"{path}{name}.")
        else:
            yield path + name
