"""Names what later packages attach to a dispatcher, which cannot import them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from ortmodule.core.config import Config, DebugOptions
from ortmodule.runtime.piece_graph import Interpreter


class Attachments(NamedTuple):
    """The observers of the debug package; each is made for one dispatcher, which it is given."""

    observers: Callable[[Any], Any]  # observers of its runs, or None
    saver: Callable[[Any], Any]  # writes its graphs, or None
    report: Callable[[Any], object]  # its report, when it is printed
    clusters: Callable[[Any], Any]  # says what backward can compute again, or None
    interpret: Interpreter  # computes nodes of a graph in PyTorch
    wrap: Callable[[nn.Module, DebugOptions | None, Config | None], nn.Module]  # makes an ORTModule of a sharded one
