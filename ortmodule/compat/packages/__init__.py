"""Packages under the names of ONNX Runtime; found by the finder of :mod:`ortmodule.compat`."""
