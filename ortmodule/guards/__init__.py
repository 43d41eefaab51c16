"""Finds what a captured graph depends on besides its inputs, and compares it at every call."""
