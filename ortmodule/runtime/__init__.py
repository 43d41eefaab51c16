"""Runs calls of a wrapped module: looks graphs up, binds tensors, and connects to autograd."""
