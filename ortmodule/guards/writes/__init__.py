"""Finds what code may change around a module, and who holds it."""
