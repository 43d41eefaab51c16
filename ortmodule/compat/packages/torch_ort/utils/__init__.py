"""Stands for `torch_ort.utils`, which is `ortmodule.utils`."""
