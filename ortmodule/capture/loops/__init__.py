"""Captures a loop over a length once, for all lengths (docs/architecture/loops.md)."""
