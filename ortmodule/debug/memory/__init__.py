"""Counts the memory of steps, and says what of it backward can compute again."""
