"""Holds what training scripts use beside the wrapped module."""
