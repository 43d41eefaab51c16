"""There is nothing to compile."""
