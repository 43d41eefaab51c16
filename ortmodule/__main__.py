"""Answers questions about a module: ``python -m ortmodule memory my_module:make_model_and_batch``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from torch import nn

from ortmodule import _core, memory
from ortmodule.core.config import Config
from ortmodule.core.setting_types import BYTES
from ortmodule.debug.peak import OPTIMIZERS, in_units
from ortmodule.module import ORTModule


def _bytes(text: str) -> int:
    try:
        return int(BYTES.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: the budget {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ortmodule", description="trains PyTorch modules through a C engine")
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("memory", help="what a training step takes, before there is one")
    about.add_argument(
        "target", metavar="MODULE:FUNCTION",
        help="a function without arguments that returns a model and a batch: a tuple of arguments, a dictionary of "
        "those with names, or one argument",
    )  # fmt: skip
    about.add_argument(
        "--budget", type=_bytes, help="bytes that a step may take, as 16GiB: the largest batch is planned"
    )
    about.add_argument("--dim", type=int, default=0, help="the dimension that is the batch (default: 0)")
    about.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="adamw", help="whose states count (default: adamw)"
    )
    return parser


def _made(target: str) -> tuple[nn.Module, Any]:
    """The model and the batch. Raises ValueError for a target that gives none."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{target}: it is MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target}: {error}") from error
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ValueError(f"{target} returns a model and a batch, not {type(made).__name__}")
    return made


def _memory(given: argparse.Namespace) -> None:
    model, batch = _made(given.target)
    module = model if isinstance(model, ORTModule) else ORTModule(model)
    args, kwargs = memory.as_arguments(batch)
    peak = memory.predict(module, *args, optimizer=given.optimizer, **kwargs)
    print(peak)
    print("budgets")
    for price in memory.pareto(module, batch, optimizer=given.optimizer):
        print(f"  {in_units(price.peak)} with {100 * price.extra_work:.1f} % more work")
    if given.budget is None:
        return
    stored = memory.largest_batch(module, batch, given.budget, given.dim, optimizer=given.optimizer)
    print(f"largest batch in {in_units(given.budget)}: {stored}")
    budget = given.budget - peak.optimizer
    if budget > 0 and not isinstance(model, ORTModule):
        smaller = ORTModule(model, config=Config(memory_budget=budget))
        again = memory.largest_batch(smaller, batch, given.budget, given.dim, optimizer=given.optimizer)
        print(f"with ORTMODULE_MEMORY_BUDGET={budget}: {again}")


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        _memory(given)
    except (ValueError, MemoryError, _core.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
