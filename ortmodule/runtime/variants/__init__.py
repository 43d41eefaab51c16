"""Tells which graph of a wrapped module a call is for, and what differs where there is none."""
