"""Checks everything; see scripts/test."""
