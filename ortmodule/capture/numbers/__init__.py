"""Follows numbers, sizes and facts that Python takes from tensors while a module is traced."""
