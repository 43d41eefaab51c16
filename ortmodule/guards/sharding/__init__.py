"""Meets modules whose parameters are spread over ranks, and their collectives."""
