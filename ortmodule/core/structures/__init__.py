"""Holds the kinds of values that arguments and results are structures of."""
