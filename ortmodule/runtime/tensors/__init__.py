"""Finds, compares and updates the tensors of a run."""
