"""Writes, compiles and interprets Triton kernels for parts of a graph (docs/architecture/triton.md)."""
