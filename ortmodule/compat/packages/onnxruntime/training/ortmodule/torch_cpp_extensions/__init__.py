"""Stands for `torch_cpp_extensions`, where there is nothing to compile."""
