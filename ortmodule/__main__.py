"""Answers questions about a module: ``python -m ortmodule memory my_module:make_model_and_batch``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from torch import nn

from ortmodule import _core, memory
from ortmodule.core.config import Config, DebugOptions
from ortmodule.core.errors import ArgumentError
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.pytree import as_arguments
from ortmodule.core.settings.setting_types import BYTES
from ortmodule.debug.memory.peak import OPTIMIZERS, in_units
from ortmodule.debug.profile import profile, train_step
from ortmodule.debug.report import report
from ortmodule.module import ORTModule


def _bytes(text: str) -> int:
    try:
        return int(BYTES.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: the budget {error}") from None


def _steps(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: the number of steps is 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ortmodule", description="trains PyTorch modules through a C engine")
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("memory", help="what a training step takes, before there is one")
    times = commands.add_parser("profile", help="where the time of training steps goes")
    for command in (about, times):
        command.add_argument(
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
    times.add_argument("--steps", type=_steps, default=5, help="steps that are measured, after one that is not")
    times.add_argument("--trace", metavar="FILE", help="a trace for Perfetto and chrome://tracing, as JSON")
    times.add_argument("--report", metavar="FILE", help="a page with graph, memory and time (needs plotly and jinja2)")
    times.add_argument("--onnx", metavar="PREFIX", help="the graph before and after, as PREFIX_..._training.onnx")
    return parser


def _made(target: str) -> tuple[nn.Module, Any]:
    """The model and the batch. Raises ValueError for a target that gives none."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ArgumentError(f"{target}: it is MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{target}: {error}") from error
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ArgumentError(f"{target} returns a model and a batch, not {type(made).__name__}")
    return made


def _memory(given: argparse.Namespace) -> None:
    model, batch = _made(given.target)
    module = model if isinstance(model, ORTModule) else ORTModule(model)
    args, kwargs = as_arguments(batch)
    peak = memory.predict(module, *args, optimizer=given.optimizer, **kwargs)
    print(peak)
    print("budgets")
    for price in memory.pareto(module, batch, optimizer=given.optimizer):
        work, seconds = f"{100 * price.extra_work:.1f} % more work", f"about {price.seconds:.3g} s a step"
        print(f"  {in_units(price.peak)} with {work}, {seconds}")
    if given.budget is None:
        return
    stored = memory.largest_batch(module, batch, given.budget, given.dim, optimizer=given.optimizer)
    print(f"largest batch in {in_units(given.budget)}: {stored}")
    budget = given.budget - peak.optimizer
    if budget > 0 and not isinstance(model, ORTModule):
        smaller = ORTModule(model, config=Config(memory_budget=budget))
        again = memory.largest_batch(smaller, batch, given.budget, given.dim, optimizer=given.optimizer)
        print(f"with ORTMODULE_MEMORY_BUDGET={budget}: {again}")


def _profile(given: argparse.Namespace) -> None:
    model, batch = _made(given.target)
    if isinstance(model, ORTModule):
        if given.onnx:
            raise ArgumentError(
                "--onnx is for a model that is not wrapped: a wrapped one has DebugOptions(save_onnx=True)"
            )
        module: Any = model
    else:
        options = DebugOptions(save_onnx=True, onnx_prefix=given.onnx) if given.onnx else None
        module = ORTModule(model, options)
    args, kwargs = as_arguments(batch)
    train_step(module, args, kwargs)  # captures
    with profile(module) as measured:
        for _ in range(given.steps):
            train_step(module, args, kwargs)
    if not measured.plans:
        reason = dispatcher_of(module).fallback.reason or "see the warnings"
        raise ArgumentError(f"PyTorch runs it, so there is nothing of the engine's to measure: {reason}")
    print(measured)
    if given.trace:
        measured.save_trace(given.trace)
    if given.report:
        report(module, given.report, batch, profile=measured)


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        {"memory": _memory, "profile": _profile}[given.command](given)
    except (ValueError, MemoryError, OSError, ImportError, _core.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
