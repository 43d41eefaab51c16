"""Stands for `onnxruntime.training.utils`, which is `ortmodule.utils`."""
