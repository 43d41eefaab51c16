"""Scores that are replaced, or lowered, so that they have no weight: attention with a mask, as models write it.

Where every query sees a key the mask is an operand of the softmax (csrc/passes/score_mask.c), and otherwise PyTorch's
numbers are those of the scores as they are: equal weights of lowest numbers, NaN of infinities.
"""

import itertools

import torch

from ortmodule import _core
from tests.passes.session import Function, export
from tests.selection import each

B, H, Q, K, WIDTH = 3, 2, 40, 37, 8
LOWEST = torch.finfo(torch.float32).min
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def lowest_of(q):
    """The lowest number of a type; of float64 as a tensor, since ``torch.where`` takes numbers that float32 has."""
    lowest = torch.finfo(q.dtype).min
    return torch.tensor(lowest, dtype=q.dtype) if q.dtype is torch.float64 else lowest


def scores(q, k):
    return q @ k.transpose(-1, -2) * WIDTH**-0.5


def shown(mask):
    return (mask != 0)[:, None, None, :]


def causal(q, k):
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()


def replaced(q, k, v, mask, bias):
    return torch.where(shown(mask), scores(q, k) + bias, torch.finfo(q.dtype).min).softmax(-1) @ v


def filled(q, k, v, mask, bias):
    """The commonest way to write it."""
    return (scores(q, k) + bias).masked_fill(~shown(mask), float("-inf")).softmax(-1) @ v


def added(q, k, v, mask, bias):
    """As transformers writes it: a mask of numbers, made once."""
    lowest = torch.where(shown(mask), 0.0, lowest_of(q)).to(q.dtype)
    return (scores(q, k) + bias + lowest).softmax(-1) @ v


def added_first(q, k, v, mask, bias):
    """As older releases write T5: the mask goes into the bias that all layers have."""
    lowest = torch.where(mask != 0, 0.0, lowest_of(q)).to(q.dtype)[:, None, None, :]
    return (scores(q, k) + (bias + lowest)).softmax(-1) @ v


def biased(q, k, v, mask, bias):
    """As T5 gives its bias to scaled_dot_product_attention."""
    allowed = shown(mask) & causal(q, k)
    return (scores(q, k) + torch.where(allowed, bias, torch.finfo(q.dtype).min)).softmax(-1) @ v


def twice(q, k, v, mask, bias):
    """Two masks, both added."""
    lowest = torch.where(shown(mask), 0.0, lowest_of(q)).to(q.dtype)
    triangle = torch.where(causal(q, k), 0.0, float("-inf")).to(q.dtype)
    return (scores(q, k) + triangle + bias + lowest).softmax(-1) @ v


def exported(q, k, v, mask, bias):
    """The same as PyTorch's function is exported."""
    x = scores(q, k) + torch.where(shown(mask), bias, torch.finfo(q.dtype).min)
    hidden = x == -torch.inf
    return torch.where(hidden, 0.0, torch.where(hidden, -torch.inf, x).softmax(-1)) @ v


def exported_narrow(q, k, v, mask, bias):
    """And as it is where the scores are widened behind the mask: what is added says what is hidden."""
    more = torch.where(shown(mask), bias, torch.finfo(q.dtype).min)
    x, hidden = scores(q, k).float() + more.float(), more == -torch.inf
    return torch.where(hidden, 0.0, torch.where(hidden, -torch.inf, x).softmax(-1)).type(q.dtype) @ v


def wide(q, k, v, mask, bias):
    """Of 16-bit floats, weighed in float32."""
    x = scores(q, k).float() + bias.float() + torch.where(shown(mask), 0.0, LOWEST)
    return x.softmax(-1).type(q.dtype) @ v


def far(q, k, v, mask, bias):
    """A number that hides enough, and is the lowest of no type: nothing is changed."""
    return (scores(q, k) + bias).masked_fill(~shown(mask), -1e9).softmax(-1) @ v


FORMS = {
    f.__name__: f for f in (replaced, filled, added, added_first, biased, exported, exported_narrow, twice, wide, far)
}


def lengths(*of):
    return (torch.arange(K) < torch.tensor(of)[:, None]).long()


MASKS = {
    "right": lengths(3, K, 17),
    "left": lengths(3, K, 17).flip(1),
    "holes": (torch.rand(B, K, generator=torch.Generator().manual_seed(3)) < 0.5).long(),
    "all": lengths(K, K, K),
    "an empty sequence": lengths(3, 0, 17),
}


def operands(dtype, kind):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, Q, WIDTH), (B, H, K, WIDTH), (B, H, K, WIDTH), (1, H, Q, K)
    q, k, v, bias = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return [q, k, v, MASKS[kind], bias]


def step(made, tensors, dy, seed=1):
    run = made.run(tensors, [t.is_floating_point() for t in tensors], [True], seed=seed)
    return [run.outputs[0], *(g for g in run.backward([dy]) if g is not None)]


def pytorch(form, tensors, dy):
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    y = form(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t.is_floating_point()], dy)]


def sees_some(name, kind):
    """Does every query see a key?"""
    allowed = shown(MASKS[kind]).expand(B, 1, Q, K)
    if name in ("biased", "twice"):
        allowed = allowed & torch.ones(Q, K, dtype=torch.bool).tril()
    return bool(allowed.any(-1).all())


#: (type, mask): ordinarily these
SHORT = [(torch.float32, "right"), (torch.bfloat16, "holes"), (torch.float32, "an empty sequence")]


#: Nothing is wider than float64, whose lowest number float32 does not have.
CASES = [case for case in itertools.product(FORMS, TOLERANCE, MASKS) if case[:2] != ("exported_narrow", torch.float64)]


@each(("name", "dtype", "kind"), CASES, lambda case: case[1:] in SHORT, ids=str)
def test_beside_pytorch(name, kind, dtype):
    form, tensors = FORMS[name], operands(dtype, kind)
    dy = torch.randn(B, H, Q, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance = TOLERANCE[torch.float32 if form is wide and dtype is torch.float64 else dtype]
    made = export(Function(form), tensors)
    for disabled in (0, _core.passes()["score_mask"]):
        made.disabled = disabled
        made.plans.clear()
        found = step(made, tensors, dy)
        fired = list(made.plans.values())[-1].fired
        assert fired.get("score_mask", 0) == (not disabled and name != "far" and sees_some(name, kind))
        for ours, theirs in zip(found, pytorch(form, tensors, dy), strict=True):
            assert ours.dtype == dtype
            assert torch.equal(ours.isnan(), theirs.isnan())
            error = (ours.double() - theirs.double()).nan_to_num().abs().max()
            assert error <= tolerance * max(1, theirs.double().nan_to_num().abs().max())


def test_batches_that_differ():
    """Each gets the plan for what its mask says."""
    made = export(Function(added), operands(torch.float32, "right"))
    dy = torch.randn(B, H, Q, WIDTH)
    for kind in ("right", "an empty sequence", "all", "an empty sequence", "left"):
        tensors = operands(torch.float32, kind)
        for ours, theirs in zip(step(made, tensors, dy), pytorch(added, tensors, dy), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_layers_ask_once():
    """What several layers hide is asked for once."""

    def layers(q, k, v, mask, bias):
        lowest = torch.where(shown(mask), 0.0, LOWEST)
        for _ in range(3):
            q = (scores(q, k) + bias + lowest).softmax(-1) @ v
        return q

    tensors = operands(torch.float32, "right")
    made = export(Function(layers), tensors)
    step(made, tensors, torch.randn(B, H, Q, WIDTH))
    plan = list(made.plans.values())[-1]
    assert plan.fired["score_mask"] == 3
    assert sum("RowCount" in line for line in plan.text().splitlines()) <= 1
    assert max(len(sizes) for *_, sizes, _, _ in made.plans) <= 2  # a key and its size


def test_a_mask_that_a_layer_computes_is_not_asked_for():
    """It would have the layer computed twice."""

    def chosen(q, k, v, mask, bias):
        seen = (k @ k.transpose(-1, -2)).sum(-1)[:, :1, None, :] > 0
        return (scores(q, k) + bias).masked_fill(~seen, LOWEST).softmax(-1) @ v + 0 * mask.sum()

    tensors = operands(torch.float32, "right")
    made = export(Function(chosen), tensors)
    dy = torch.randn(B, H, Q, WIDTH)
    for ours, theirs in zip(step(made, tensors, dy), pytorch(chosen, tensors, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert len(made.plans) == 1 and "score_mask" not in next(iter(made.plans.values())).fired
