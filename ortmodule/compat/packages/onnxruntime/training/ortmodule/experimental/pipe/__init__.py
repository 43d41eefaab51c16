"""Gives the pipelines of DeepSpeed whose layers are each an ORTModule."""

from ortmodule.compat.pipeline import ORTPipelineModule

__all__ = ["ORTPipelineModule"]
