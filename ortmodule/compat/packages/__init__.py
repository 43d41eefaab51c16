"""Holds packages under the names of ONNX Runtime, for the finder of :mod:`ortmodule.compat`."""
