"""Policies decide what PyTorch runs, reasons are remembered, and STRICT lets nothing past the engine."""

import pytest
import torch

from ortmodule.core.errors import BypassError, Cause, NotInEngine
from ortmodule.host.fallback import THREAD, Fallback, inside_assigned, only_pytorch


class Said:
    def __init__(self):
        self.lines = []

    def __getattr__(self, name):
        return lambda text, *rest: self.lines.append(str(text))


def fallback(*policies, **settings):
    return Fallback(frozenset(policies), False, Said(), **settings)


def test_only_pytorch_is_put_back():
    with only_pytorch():
        assert THREAD.only_pytorch
        with pytest.raises(ValueError), inside_assigned("owner"):
            assert THREAD.in_assigned == "owner"
            raise ValueError
        assert THREAD.only_pytorch and THREAD.in_assigned is None
    assert not THREAD.only_pytorch


def test_what_is_forced():
    assert fallback("FALLBACK_FORCE_TORCH_FORWARD").forced()
    backward = fallback("FALLBACK_FORCE_TORCH_BACKWARD")
    assert backward.forced()
    with torch.no_grad():
        assert not backward.forced() and fallback("FALLBACK_FORCE_TORCH_FORWARD").forced()
    assert not fallback("FALLBACK_DISABLE", "FALLBACK_FORCE_TORCH_FORWARD").forcing


class Guard:
    def __init__(self, holds):
        self.holds = holds

    def hold(self, epoch):
        return epoch in self.holds


def test_refusals_are_remembered_as_long_as_they_hold():
    each = fallback()
    error = NotInEngine(Cause.DATA, "no", key="k")
    assert each.refusal(0, "k") is None
    each.refused["k"] = error
    assert each.refusal(0, "other", "k") is error
    error.guards = Guard([1])
    assert each.refusal(1, "k") is error and each.refusal(2, "k") is None


def test_policies_allow_causes():
    each = fallback("FALLBACK_UNSUPPORTED_DATA")
    assert each.allows(Cause.DATA) and not each.allows(Cause.DEVICE)
    each.allow(NotInEngine(Cause.DATA, "no"))
    with pytest.raises(BypassError):
        each.allow(NotInEngine(Cause.DEVICE, "no"))


def test_strict():
    each = fallback("FALLBACK_UNSUPPORTED_DATA", strict=True)
    with pytest.raises(BypassError, match="no graph"):
        each.allow(NotInEngine(Cause.DATA, "no graph"))
