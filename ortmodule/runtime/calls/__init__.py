"""Follows calls of a wrapped module: who ran them, what they hold, what captures may cost."""
