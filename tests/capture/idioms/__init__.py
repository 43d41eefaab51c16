"""Holds what public code says in forward, a function for each way of saying it."""
