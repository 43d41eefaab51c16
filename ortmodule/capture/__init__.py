"""Traces a module, checks what the trace depends on, and makes the graph that stands for it."""
