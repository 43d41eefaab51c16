"""Writes statistics of activations and their gradients to files, under the original's names.

    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber("pt_out", override_output_dir=True)])

Each tensor that a submodule returns passes through an autograd function, which a captured graph keeps as a node: the
engine runs the rest, and the same files come from a wrapped module and from a plain one.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import CompatError, ExistingFileError
from ortmodule.core.objects.dispatchers import dispatcher_of
from ortmodule.core.torch_private import traced, tree_map_only
from ortmodule.host.fallback import THREAD

#: Elements that a summary shows.
SAMPLES = 128


class StatisticsSubscriber:
    """Writes a file for each activation, and one for its gradient, in `<output_dir>/step_<n>`.

    ``start_step``, ``end_step``: steps before the first and from the second on are left out. ``override_output_dir``:
    what is in the folder is deleted; otherwise a folder that exists is an error (FileExistsError). ``run_on_cpu``:
    tensors are copied there first. ``bucket_size``: accepted for old scripts.
    """

    def __init__(
        self, output_dir: str, start_step: int | None = None, end_step: int | None = None,
        override_output_dir: bool = False, run_on_cpu: bool = False, bucket_size: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.on_cpu = Path(output_dir), run_on_cpu
        self.start, self.end = start_step or 0, end_step
        if self.folder.exists():
            if not override_output_dir:
                raise ExistingFileError(f"the folder {output_dir} exists: override_output_dir=True deletes it")
            shutil.rmtree(self.folder)

    def write(self, step: int, name: str, direction: str, tensor: torch.Tensor) -> None:
        """A file for ``tensor``. ``direction``: forward or backward."""
        if step < self.start or (self.end is not None and step >= self.end):
            return
        folder = self.folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{name} {direction} run"
        with open(folder / "order.txt", "a", encoding="utf-8") as file:
            file.write(f"{title}\n")
        found = tensor.detach()
        (folder / f"{name}_{direction}").write_text(
            describe(title, found.cpu() if self.on_cpu else found), encoding="utf-8"
        )


def describe(title: str, tensor: torch.Tensor) -> str:
    """Statistics of ``tensor``, in lines."""
    flat = tensor.reshape(-1)
    lines = [f"{title} shape: {tuple(tensor.shape)} dtype: {tensor.dtype} size: {flat.numel()}"]
    if flat.numel():
        numbers = flat.double() if not flat.is_complex() else flat.abs().double()
        finite = numbers[numbers.isfinite()]
        if finite.numel():
            figures = finite.min(), finite.max(), finite.mean(), finite.std(correction=0)
            lines.append("min: {:.9g} max: {:.9g} mean: {:.9g} std: {:.9g}".format(*(f.item() for f in figures)))
        lines.append(f"nan: {int(numbers.isnan().sum())}, inf: {int(numbers.isinf().sum())}")
        signs = [int((numbers < 0).sum()), int((numbers > 0).sum()), int((numbers == 0).sum())]
        lines.append("neg: {}, pos: {}, zero: {}".format(*signs))
        lines.append(f"samples (first {SAMPLES}): {flat[:SAMPLES].tolist()}")
    return "\n".join(lines) + "\n"


class _Inspect(torch.autograd.Function):
    """The identity, which shows the tensor and its gradient to the subscribers of a manager."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, ends_step: bool) -> torch.Tensor:
        ctx.name, ctx.step = name, GlobalSubscriberManager.shown(name, tensor, ends_step)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.step is not None:
            GlobalSubscriberManager.write(ctx.step, ctx.name, "backward", grad)
        return grad, None, None


class _Manager:
    """The subscribers of this process, and the step that it is in."""

    def __init__(self) -> None:
        self.subscribers: list[StatisticsSubscriber] = []
        self.step = 0
        self._lock = threading.Lock()
        self._changed: list[tuple[dict[str, Any], Any]] = []  # attributes of modules, and the forward there was

    def subscribe(self, module: nn.Module, subscribers: Sequence[Any]) -> None:
        """Shows what ``module`` and its submodules return to ``subscribers``: a call of ``module`` is a step. It may be
        wrapped before or after. A module that was subscribed before is so no longer. Raises CompatError for subscribers
        of other kinds.
        """
        for subscriber in subscribers:
            if not isinstance(subscriber, StatisticsSubscriber):
                raise CompatError(f"a subscriber is a StatisticsSubscriber, not {type(subscriber).__name__}")
        self.unsubscribe()
        self.subscribers, self.step = list(subscribers), 0
        for number, each in enumerate(module.modules()):
            own = dispatcher_of(each)
            forward = each.forward if own is None else own.module.forward
            # Not a hook: a module with hooks PyTorch runs. What stands here is a part of the graph.
            self._changed.append((vars(each), vars(each).get("forward")))
            vars(each)["forward"] = _showing(forward, f"{type(each).__name__}_{number}", each is module)

    def unsubscribe(self) -> None:
        """Takes off all that :meth:`subscribe` has put on."""
        for attributes, forward in self._changed:
            del attributes["forward"]
            if forward is not None:
                attributes["forward"] = forward
        self.subscribers, self._changed = [], []

    def shown(self, name: str, tensor: torch.Tensor, ends_step: bool) -> int | None:
        """Writes an activation; the step that it belongs to, or None while a graph is made or checked."""
        if traced() or THREAD.only_pytorch:
            return None
        with self._lock:
            step = self.step
            self.step += ends_step
        self.write(step, name, "forward", tensor)
        return step

    def write(self, step: int, name: str, direction: str, tensor: torch.Tensor) -> None:
        for subscriber in self.subscribers:
            subscriber.write(step, name, direction, tensor)


GlobalSubscriberManager = _Manager()


def _tensors(result: Any) -> list[torch.Tensor]:
    """Those of a result that may have a gradient."""
    found: list[torch.Tensor] = []
    if tree_map_only is not None:
        tree_map_only(torch.Tensor, found.append, result)
    return [tensor for tensor in found if tensor.is_floating_point()]


def _showing(forward: Callable, name: str, is_whole: bool) -> Callable:
    @functools.wraps(forward)
    def show(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        numbers, found = itertools.count(), _tensors(result)

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            number = next(numbers)
            return _Inspect.apply(tensor, f"{name}_{number}th_output", is_whole and number == len(found) - 1)

        return result if tree_map_only is None else tree_map_only(torch.Tensor, one, result)

    return show


def inspect_activation(activation_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, after showing it, and its gradient in backward, to the subscribers."""
    if not GlobalSubscriberManager.subscribers:
        return tensor
    return _Inspect.apply(tensor, activation_name, False)
