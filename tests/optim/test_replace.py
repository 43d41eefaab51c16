"""A method is replaced where ours returns the same, and stays as it is where not."""

import math

import pytest
import torch

from ortmodule.optim.replace import StandIn, fits, has_method, replace, same, square_sums


class Target:
    scale = 2.0

    def double(self, x, *, out=None):
        return x * self.scale

    @property
    def shown(self):
        return self.scale


def test_replaced_once_proved():
    target, asked = Target(), []

    def ours(original, x):
        asked.append(x)
        return x + x

    replace(target, "double", ours)
    assert target.double(3.0) == 6.0 and target.double(4.0) == 8.0 and asked == [3.0, 4.0]


@pytest.mark.parametrize("wrong", [lambda original, x: x, lambda original, x: 1 / 0])
def test_one_that_is_not_the_same_stays(wrong):
    target = Target()
    replace(target, "double", wrong)
    with pytest.warns(UserWarning, match="Target.double is not what FP16_Optimizer takes it for"):
        assert target.double(3.0) == 6.0
    assert target.double(3.0) == 6.0  # without asking


def test_same():
    x = torch.tensor([1.0, math.nan])
    assert same(x.clone(), x) and same(x * 1.001, x) and same([1, "a"], [1, "a"]) and same(math.inf, math.inf)
    assert not any(
        same(a, b)
        for a, b in [(x.double(), x), (x * 1.1, x), (x[None], x), (1, True), ((1,), [1]), (0.0, 1e-9), ([1], [1, 2])]
    )


def test_methods():
    assert has_method(Target(), "double", "x", "out") and not has_method(Target(), "double", "y")
    assert not has_method(Target(), "scale") and not has_method(Target(), "none")
    assert has_method([], "append") is has_method([], "append", "object")


def test_a_stand_in():
    target = Target()
    standing = StandIn(target, scale=5.0)
    assert standing.scale == 5.0 and isinstance(standing, Target) and Target.double(standing, 2.0) == 10.0
    standing.other = 3
    assert target.other == 3 and target.scale == 2.0


def test_square_sums():
    tensors = [torch.full((3,), 2.0), torch.ones(2, 4)[:, ::2], torch.tensor([3.0], dtype=torch.bfloat16)]
    assert [s.item() for s in square_sums(tensors)] == [12.0, 4.0, 9.0]
    large = torch.full((2,), 3e38)
    assert square_sums([large])[0].isfinite() and square_sums([]) == []
    assert square_sums([torch.tensor([1.0, math.inf])])[0].item() == math.inf
    assert square_sums([torch.tensor([1.0, math.nan])])[0].isnan()


def test_fits():
    assert fits([torch.ones(1), torch.ones(1, dtype=torch.float16)])
    assert not fits([torch.ones(1, dtype=torch.float64)]) and not fits([torch.eye(2).to_sparse()]) and not fits([3])
