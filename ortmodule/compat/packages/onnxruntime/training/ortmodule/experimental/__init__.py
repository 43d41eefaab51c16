"""Stands for `onnxruntime.training.ortmodule.experimental`."""
