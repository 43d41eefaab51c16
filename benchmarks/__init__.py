"""Measurements. None is a test: they need a quiet machine."""
