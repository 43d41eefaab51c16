"""Follows calls of a wrapped module: who ran them, what changed between them, what captures may cost."""
