"""Rows that matter, on the emulated GPU: counting, packing and unpacking them, dropout of what is packed."""

import pytest
import torch

from ortmodule import ORTModule, _core
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.passes.test_rows import LANGUAGE, Loss, check, graphs, language, model, seeded_step, sentence

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter and of transformers
]


def made(name, **more):
    kind, head, config = LANGUAGE[name]
    return Loss(model(kind, head, **config, **more))


@pytest.mark.parametrize("kind", ["left", "holes"])
def test_steps_are_those_of_all_rows(driver, kind):  # noqa: F811
    """With dropout, whose masks are those of all rows; with labels on few tokens, and with all tokens there."""
    check(made("bert"), [language(kind), language("full", 0.2)], {"label_sparsity", "padding_removal"})


def test_chosen_tokens(driver):  # noqa: F811
    check(model("bert", "SequenceClassification"), [sentence("right")], {"row_selection", "padding_removal"})


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_other_types(driver, kind):  # noqa: F811
    """Rows of 2 and of 8 bytes an element, and a width that is a multiple of nothing larger."""
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    module = made("bert", **{**dry, "hidden_size": 33, "num_attention_heads": 3, "intermediate_size": 35}).to(kind)
    wrapped, batch = ORTModule(module), language("holes")
    loss, grads = seeded_step(wrapped, batch)
    grads = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
    assert any("PackRows" in plan.text() for graph in graphs(wrapped) for plan in graph.session.plans.values())
    module.zero_grad()
    wide = made("bert", **{**dry, "hidden_size": 33, "num_attention_heads": 3, "intermediate_size": 35}).double()
    expected = wide(**batch)
    expected.backward()
    tolerance = 0.05 if kind is torch.bfloat16 else 1e-9
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for name, theirs in wide.named_parameters():
        size = theirs.grad.abs().max().item()
        assert (grads[name].double() - theirs.grad).abs().max().item() <= tolerance * size + 1e-4, name
