"""Which devices the engine takes, and what of PyTorch's state each has (ortmodule/core/devices.py)."""

from types import SimpleNamespace

import pytest
import torch

from ortmodule import ORTModule, _core
from ortmodule.core import devices


def tensors(*places):
    return [(f"t{i}", SimpleNamespace(device=torch.device(place))) for i, place in enumerate(places)]


def test_one_device():
    assert devices.refusal([]) is None
    assert devices.refusal(tensors("cpu", "cpu")) is None


@pytest.mark.parametrize(
    "places, sentence",
    [
        (("cpu", "cuda:1"), "t1 is on cuda:1, t0 on cpu"),
        (("cuda:0", "cuda:0", "cuda:1"), "t2 is on cuda:1, t0 on cuda:0"),
        (("cuda:0", "cpu"), "t1 is on cpu, t0 on cuda:0"),
        (("cpu", "meta"), "t1 is on meta"),
    ],
)
def test_tensors_on_two_devices(places, sentence):
    assert devices.refusal(tensors(*places)) == sentence


@pytest.mark.skipif(_core.emulated or torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu():
    with pytest.raises(_core.Error) as error:
        _core.cuda_devices()
    assert devices.refusal(tensors("cuda:0")) == f"t0 is on cuda:0: {error.value}"


def test_module_on_two_devices_is_refused(monkeypatch):
    """The sentence names both; PyTorch then says its own."""
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model = torch.nn.Linear(3, 2)
    model.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(Exception, match="bias is on meta"):
        ORTModule(model)(torch.randn(4, 3))


def test_autocast_of_both_kinds():
    """What was on is on again inside, whatever is around it."""
    off = devices.autocast_off()
    with torch.autocast("cpu", torch.bfloat16):
        then = devices.autocast()
        assert then[0] == (True, torch.bfloat16)
        with devices.autocast_as(off):
            assert devices.autocast() == off
            with devices.autocast_as(then):
                assert devices.autocast() == then
        assert devices.autocast() == then
    assert devices.autocast() == off


def test_generators_are_put_back():
    states = devices.generators()
    first = torch.rand(3)
    devices.set_generators(states)
    assert torch.equal(torch.rand(3), first)
