"""Rows that matter, on the emulated GPU: counting, packing and unpacking them, dropout of what is packed."""

import gc
import warnings

import pytest
import torch

from ortmodule import ORTModule, _core
from ortmodule.engine.row_count_predictor import STEADY
from tests.cuda.failing_calls import FailingCalls
from tests.cuda.test_emulated import driver, library  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import Cached
from tests.passes.test_rows import LANGUAGE, Loss, Tagger, check, graphs, language, model, seeded_step, sentence, tagged
from tests.selection import each

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter and of transformers
]


def made(name, **more):
    kind, head, config = LANGUAGE[name]
    return Loss(model(kind, head, **config, **more))


@each("kind", ["left", "holes"], ["holes"])
def test_steps_are_those_of_all_rows(driver, kind):  # noqa: F811
    """With dropout, whose masks are those of all rows; with labels on few tokens, and with all tokens there."""
    check(made("bert"), [language(kind), language("full", 0.2)], {"label_sparsity", "padding_removal"})


def test_dropout_of_rows_in_pieces(driver):  # noqa: F811
    """Rows of 64 elements, a quarter of what a warp has: it draws for several of them."""
    check(
        made("bert", hidden_size=64, intermediate_size=64), [language("holes")], {"label_sparsity", "padding_removal"}
    )


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


# --- the number of rows -----------------------------------------------------------------------------------------------


def waits(driver, wrapped, batch):  # noqa: F811
    """A step: (what it gave, how often the host waited, how often while a GPU would have had nothing to do)."""
    before = driver.fake_waits(), driver.fake_idle()
    loss, grads = seeded_step(wrapped, batch)
    found = loss.clone(), {name: None if grad is None else grad.clone() for name, grad in grads.items()}
    return found, driver.fake_waits() - before[0], driver.fake_idle() - before[1]


def same_step(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    for name, grad in ours[1].items():
        assert (grad is None and theirs[1][name] is None) or torch.equal(grad, theirs[1][name]), name


@pytest.mark.parametrize("on", ["1", "0"])
def test_a_gpu_is_never_idle_for_the_number_of_rows(driver, monkeypatch, on):  # noqa: F811
    """In a steady state the host waits for it when all of forward has been started, and for nothing else; with CUDA
    graphs, too. At first it does not know, and waits before."""
    monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", on)
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    wrapped, batch, started = ORTModule(made("bert", num_hidden_layers=1)), language("right"), driver.fake_graphs()
    found = [waits(driver, wrapped, batch) for _ in range(6)]
    for step, (ours, waited, idle) in enumerate(found):
        same_step(ours, found[0][0])
        assert idle == 0 if step >= STEADY else idle >= 2, step
        assert step == 0 or waited == 2, step  # labels and tokens; the first step makes plans
    assert (driver.fake_graphs() > started) == (on == "1")


#: Of one shape: few rows of tokens and of labels; many of both; as many tokens, other numbers of labels.
FEW, MANY = language("right"), language("full", 0.2)
LABELS = [FEW | {"labels": FEW["labels"].masked_fill(torch.rand(8, 16) > share, -100)} for share in (0.3, 0.6)]
LABELS += [FEW | {"labels": FEW["input_ids"].masked_fill(FEW["attention_mask"] == 0, -100)}]
JUMPS = {"more": [FEW, MANY], "fewer": [MANY, FEW], "labels": [LABELS[1], LABELS[2], LABELS[0]]}


@each("jump", JUMPS, ["labels"])
def test_a_number_of_rows_that_changes(driver, jump):  # noqa: F811
    """Too many rows for what was expected: the step is done again, before the caller sees anything of it; with the same
    masks, and one seed of torch's generator."""
    wrapped, batches = ORTModule(made("bert", num_hidden_layers=1)), JUMPS[jump]
    exact = []
    for batch in batches:  # each seen for the first time
        exact.append(waits(driver, ORTModule(made("bert", num_hidden_layers=1)), batch)[0])
        drawn = torch.get_rng_state()
    for step, i in enumerate([0] * 4 + [1] * 4 + [0, 1] + [len(batches) - 1] * 4):
        ours = waits(driver, wrapped, batches[i])[0]
        assert torch.equal(torch.get_rng_state(), drawn)
        if step not in (4, 8):  # with room for more rows than there are sums may be rounded in another order
            same_step(ours, exact[i])
        torch.testing.assert_close(ours[0], exact[i][0])
        for name, grad in ours[1].items():
            if grad is not None:
                torch.testing.assert_close(grad, exact[i][1][name], rtol=1e-3, atol=1e-5, msg=f"{step} {name}")


def test_errors_while_a_number_is_on_its_way(driver, monkeypatch):  # noqa: F811
    """Each call of a steady step fails once: the next step is right, and nothing is left behind. Without CUDA graphs,
    which are kept as addresses come back."""
    monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", "0")
    module = Tagger()
    wrapped, batch = ORTModule(module), tagged(12, 9, kept=0.3)
    for _ in range(5):
        expected = waits(driver, wrapped, batch)[0]
    spare = [_core.read(torch.tensor(0), 0) for _ in range(4)]
    del spare  # their places are kept: what an error holds for a while takes one
    gc.collect()
    calls, held = FailingCalls(driver), driver.fake_held()
    for attempt in calls:
        torch.manual_seed(0)
        with warnings.catch_warnings(), attempt:
            warnings.simplefilter("ignore")
            wrapped(**batch)
        same_step(waits(driver, wrapped, batch)[0], expected)
        assert driver.fake_held() == held
    assert calls.failures > 5


def test_a_number_on_its_way(driver):  # noqa: F811
    """It arrives when the host waits; one that is dropped is waited for before its place is used again."""
    numbers = [_core.read(torch.tensor(7 * i), 0) for i in range(5)]
    assert [number.value() for number in reversed(numbers)] == [28, 21, 14, 7, 0]
    assert numbers[2].value() == 14
    before = driver.fake_waits()
    _core.read(torch.tensor(1), 1)
    assert driver.fake_waits() == before + 1
    with pytest.raises(ValueError, match=r"number 0: expected int64 \[\], got int64 \[2\]"):
        _core.read(torch.zeros(2, dtype=torch.int64), 0)
    with pytest.raises(_core.Error, match="there is no cuda:7"):
        _core.read(torch.tensor(1), 7)
