"""Follows what forward draws, and what it asks of time and its process, while it is traced."""
