"""Measures speed and memory; no module of it is a test: they need a quiet machine."""
