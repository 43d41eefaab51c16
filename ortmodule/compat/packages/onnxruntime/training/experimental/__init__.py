"""Stands for `onnxruntime.training.experimental`."""

from ortmodule.compat.gradient_graph import export_gradient_graph

__all__ = ["export_gradient_graph"]
