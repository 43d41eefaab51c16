"""Makes one module of a module and its loss, for scripts that compute the loss outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ortmodule.core.errors import ArgumentTypeError


class ModuleWithLoss(nn.Module):
    """``loss(module(...), labels)`` as a module: wrap it, and the engine sees that nothing but the loss is seen. Rows
    whose label is ignored and padding are then not computed::

        model = ORTModule(ModuleWithLoss(model, nn.CrossEntropyLoss()))
        model(features, labels=labels).backward()

    ``loss``: takes what ``module`` returns and the labels, and returns the loss. ``labels``: the name of the argument
    of :meth:`forward` that holds the labels, which ``module`` does not get. The original module stays ``.module``, and
    its parameters are shared.

    Raises TypeError when forward is called without labels.
    """

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], torch.Tensor], labels: str = "labels") -> None:
        super().__init__()
        self.module, self.loss, self.labels = module, loss, labels

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of ``module(*args, **kwargs)``, which gets all arguments but the labels."""
        if self.labels not in kwargs:
            raise ArgumentTypeError(f"{type(self).__name__} wants the labels as {self.labels}=...")
        labels = kwargs.pop(self.labels)
        return self.loss(self.module(*args, **kwargs), labels)
