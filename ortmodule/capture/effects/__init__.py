"""Follows what forward sets and keeps elsewhere than in its result, while it is traced."""
