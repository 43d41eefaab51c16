"""Stands for Optimum where it is not installed: only `optimum.onnxruntime` is here, with its trainers."""
