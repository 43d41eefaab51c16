"""Replaces calls that a trace has to take in another way."""
