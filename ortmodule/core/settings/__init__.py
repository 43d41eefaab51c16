"""Holds what settings are made of: their types, their older keys, files that only their owner writes."""
