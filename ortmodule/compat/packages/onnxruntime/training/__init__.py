"""Stands for `onnxruntime.training`, which is ortmodule."""
