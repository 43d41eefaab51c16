"""Lists cases, a module for each C family file (csrc/ops/<family>.c); tests/ops/cases.py joins them."""
