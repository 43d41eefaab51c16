"""Finds what code reads inside of attributes, and where it stands again at a later call."""
