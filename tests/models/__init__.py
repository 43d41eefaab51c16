"""Whole models: the same loss, gradients and training as in PyTorch, and proof that PyTorch is not what runs."""
