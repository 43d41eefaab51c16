"""Tests on several processes."""
