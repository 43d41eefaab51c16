"""Trains models, to read and to run: python -m examples.<name>.train --help."""
