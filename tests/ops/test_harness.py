"""How exact the comparison of drawn operands is: roundings pass, however much cancels, and little more does."""

import pytest

from tests.ops.harness import Trial
from tests.ops.test_ops import FAMILIES, resized

#: Of two elements, which a norm makes about 1 and -1: what their gradients leave is a thousandth of what cancels.
OF_TWO = [
    (case, size)
    for op, size in [("BatchNormalization", 3), ("LayerNormalization", 5)]
    for case in FAMILIES["batchnorm" if op[0] == "B" else "norm"]
    if case.op == op and case.has_gradient and "float32" in case.dtypes and case.attrs.get("training_mode", 1)
    and any(spec and size in spec.shape for spec in case.inputs)
]  # fmt: skip


def trials(case, size):
    for seed in range(20):
        tensors = case.tensors("float32", seed, resized(case, {size: 2}))
        if all(x is None or x.numel() for x in tensors):
            yield Trial(case, "float32", tensors)


@pytest.mark.parametrize(("case", "size"), OF_TWO, ids=lambda x: getattr(x, "name", x))
def test_roundings_pass(case, size):
    for trial in trials(case, size):
        trial.check_drawn()


@pytest.mark.parametrize(("case", "size"), OF_TWO, ids=lambda x: getattr(x, "name", x))
def test_more_does_not(case, size, monkeypatch):
    run = Trial.run

    def wrong(*args, **kwargs):
        found = run(*args, **kwargs)
        for g in found.grads:
            if g is not None:
                g *= 1.05
        return found

    monkeypatch.setattr(Trial, "run", wrong)
    for trial in trials(case, size):
        with pytest.raises(AssertionError, match="gradient of operand"):
            trial.check_drawn()
