"""Fixtures of the integrations: captures do not wait until they pay."""

import pytest


@pytest.fixture
def at_once(monkeypatch):
    """What a checkpoint changes in a model's configuration asks for another graph."""
    monkeypatch.setenv("ORTMODULE_CAPTURE_SHARE", "inf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
