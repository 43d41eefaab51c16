"""Explains, verifies, measures and saves what the engine runs."""
