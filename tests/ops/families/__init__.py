"""One module per C family file (csrc/ops/<family>.c), each with a list CASES; tests/ops/cases.py joins them."""
