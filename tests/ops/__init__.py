"""Operators, one at a time: the case list and what is derived from it."""
