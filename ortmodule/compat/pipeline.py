"""Makes each layer of DeepSpeed's PipelineModule an ORTModule: `ORTPipelineModule`."""

from __future__ import annotations

from typing import Any

from torch import nn

from ortmodule.core.config import DebugOptions
from ortmodule.core.errors import MissingPackageError
from ortmodule.module import ORTModule

try:
    from deepspeed.pipe import PipelineModule
except ImportError as error:
    text = f"ORTPipelineModule is for DeepSpeed's pipelines, and deepspeed cannot be imported: {error}"
    raise MissingPackageError(text) from None


class ORTPipelineModule(PipelineModule):  # type: ignore[misc]  # deepspeed has no types
    """As `deepspeed.pipe.PipelineModule`, with the same arguments; the engine runs the layers.

    ``debug_options``: a :class:`ortmodule.DebugOptions` for all of them.
    """

    def __init__(self, layers: Any, *args: Any, debug_options: DebugOptions | None = None, **kwargs: Any) -> None:
        self._debug_options = debug_options
        self.forward_funcs: list[Any] = []
        super().__init__(layers, *args, **kwargs)

    def _build(self) -> None:
        super()._build()
        # What is registered stays the layer itself: names in checkpoints are DeepSpeed's.
        self.forward_funcs = [
            ORTModule(layer, self._debug_options) if isinstance(layer, nn.Module) else layer
            for layer in self.forward_funcs
        ]
