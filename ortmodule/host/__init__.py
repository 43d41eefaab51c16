"""Lets PyTorch run what the engine does not: whole calls, submodules, operators inside of a graph."""
