"""Optimizers that run through the engine; installed as ``ortmodule.optim``."""
