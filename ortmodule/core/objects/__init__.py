"""Finds and follows objects of Python and tensors' memory, and replaces attributes for a while."""
