"""Runs plans of the C engine: sessions, tuning, predictions of sizes."""
