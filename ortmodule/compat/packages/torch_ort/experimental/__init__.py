"""Stands for `torch_ort.experimental`."""
