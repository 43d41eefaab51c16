"""Finds where exported graphs are cut into pieces, and cuts them."""
