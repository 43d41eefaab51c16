"""The engine finds objects by their types while no other thread runs."""

import random
import threading

import pytest
import torch

from ortmodule import _core


def test_objects_of_a_type_and_its_subtypes():
    tensor, parameter, generator = torch.ones(2), torch.nn.Parameter(torch.ones(3)), random.Random(0)
    found = _core.objects((torch.Tensor, random.Random))
    for each in (tensor, parameter, generator):
        assert sum(other is each for other in found) == 1
    assert all(isinstance(each, (torch.Tensor, random.Random)) for each in found)


def test_the_young_alone():
    made = [torch.ones(2)]
    young = [*_core.objects((torch.Tensor,), 0), *_core.objects((torch.Tensor,), 1)]
    assert len(young) <= len(_core.objects((torch.Tensor,)))
    assert any(each is made[0] for each in [*young, *_core.objects((torch.Tensor,))])


@pytest.mark.parametrize("arguments", [(), ([torch.Tensor],), ((1,),), ((torch.Tensor,), 7), ((torch.Tensor,), "old")])
def test_bad_arguments(arguments):
    with pytest.raises((TypeError, ValueError)):
        _core.objects(*arguments)


def test_threads_that_make_tuples():
    """Python refuses to finish a tuple that something else refers to."""
    errors, stop = [], threading.Event()

    def make():
        while not stop.is_set():
            try:
                assert len(tuple(str(i) for i in range(300))) == 300
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        _core.objects((torch.Tensor,))
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
