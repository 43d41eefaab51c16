"""Gives `ORTPipelineModule`, DeepSpeed's pipeline of layers that are ORTModules, its name in ONNX Runtime."""

from ortmodule.compat.pipeline import ORTPipelineModule

__all__ = ["ORTPipelineModule"]
