"""Holds what every package builds on: settings, errors, element types, devices, structures of arguments."""
