"""Stands for `onnxruntime.training.ortmodule.experimental.json_config`."""

from ortmodule.compat.json_config import load_from_json

__all__ = ["load_from_json"]
