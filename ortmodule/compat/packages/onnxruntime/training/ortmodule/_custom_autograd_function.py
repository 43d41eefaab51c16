"""Provides the switch for `torch.autograd.Function` inside of modules."""

from ortmodule.compat._custom_autograd_function import enable_custom_autograd_support

__all__ = ["enable_custom_autograd_support"]
