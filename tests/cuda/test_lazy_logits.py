"""Logits that the script does not read are not computed on a GPU; later they have their forward's bits."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, _core, explain
from ortmodule.core.lazy_tensor import Deferred
from ortmodule.engine import session
from ortmodule.engine.digests import Digests
from ortmodule.engine.row_count_predictor import STEADY
from ortmodule.runtime.lazy_logits import FORWARD, HEAD, MOST_IN_VAIN, _WaitingForward, _WaitingHead
from tests.cuda.test_emulated import driver  # noqa: F401  (a fixture)
from tests.cuda.test_graphs import Cached
from tests.cuda.test_user_capture import capture  # noqa: F401  (a fixture)
from tests.passes.test_rows import graphs

pytestmark = [
    pytest.mark.skipif(not _core.emulated, reason="a build with an emulated GPU is needed"),
    pytest.mark.filterwarnings("ignore"),  # of the exporter
]

WORDS, WIDTH, BATCH, LENGTH, LABELLED = 61, 16, 8, 16, 30


class Language(nn.Module):
    """Rows of features, a head, its loss, and the logits, as language models have them."""

    def __init__(self, p=0.0):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(p)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.layer(self.drop(self.embedding(ids)))))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def pair(monkeypatch, p=0.0, kind=torch.float32, of=Language):
    """A module whose logits are put off from the first call on, and one with all logits."""
    torch.manual_seed(0)
    model, made = of(p).to(kind).train(), []
    for setting in ("1", "0"):
        monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", setting)
        made.append(ORTModule(copy.deepcopy(model)))
    return made


class Kept:
    """Memory that stays with a graph that was captured."""

    def __init__(self):
        self.all, self.empty = [], session._empty

    def __call__(self, *args):
        self.all.append(self.empty(*args))
        return self.all[-1]


def batch_of(seed=0, labelled=LABELLED):
    torch.manual_seed(seed)
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    chosen = torch.randperm(ids.numel())[:labelled]
    return ids, torch.full_like(ids, -100).flatten().index_copy(0, chosen, ids.flatten()[chosen]).view_as(ids)


def rows_of_logits(wrapped):
    """The most rows of logits that a kernel of the last plan writes."""
    plan = list(graphs(wrapped)[0].plans.values())[-1].plan
    shapes = [row[4][1] for row in plan.code() if row[4] is not None]
    return max(shape.numel() // WORDS for shape in map(torch.Size, shapes) if shape and shape[-1] == WORDS)


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def same(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


BITS = {"rtol": 0, "atol": 0}
NEAR = {"rtol": 1e-4, "atol": 1e-6}


def test_only_labelled_rows_are_computed(driver, monkeypatch):  # noqa: F811
    """Losses and gradients are PyTorch's; once the number of rows is steady the GPU is never idle for it."""
    wrapped, _ = pair(monkeypatch)
    expected = copy.deepcopy(wrapped._ortmodule.module)
    for step in range(STEADY + 3):
        batch, before = batch_of(step), (driver.fake_idle(), driver.fake_calls())
        loss, logits = wrapped(*batch)
        loss.backward()
        assert type(logits) is Deferred and driver.fake_calls() > before[1]
        assert step < STEADY or driver.fake_idle() == before[0]
        assert "label_sparsity" in explain(wrapped).fused
        assert rows_of_logits(wrapped) < BATCH * LENGTH / 2
        theirs = expected(*batch)
        theirs[0].backward()
        same([loss, *gradients(wrapped)], [theirs[0], *gradients(expected)], **NEAR)


KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "autocast": torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_have_the_bits_of_a_forward_that_computes_them(driver, monkeypatch, kind):  # noqa: F811
    """With dropout; read before and behind an optimizer's step, and two forwards before backward."""
    wrapped, plain = pair(monkeypatch, 0.3, KINDS[kind])
    found = []
    for model in (wrapped, plain):
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.5), []
        for first in (0, 2):
            outs = []
            for seed in (first, first + 1):
                torch.manual_seed(seed)
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    outs.append(model(*batch_of(seed)))
            if model is wrapped and first == 0:
                assert type(outs[0][1]) is type(outs[1][1]) is Deferred
            seen += [outs[first // 2][1].detach().clone()]  # now
            (outs[0][0] + outs[1][0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [out[1].detach().clone() for out in outs]  # later
        found.append(seen)
    same(found[0][:3], found[1][:3], **BITS)
    same(found[0][3:], found[1][3:], rtol=1e-2, atol=1e-2)  # of weights that rows left out have changed the sums of


@pytest.mark.parametrize("look", ["loss", "logits", "both"])
def test_gradients_of_logits(driver, monkeypatch, look):  # noqa: F811
    found = []
    for model in pair(monkeypatch, 0.3):
        torch.manual_seed(5)
        loss, logits = model(*batch_of())
        of = {"loss": loss, "logits": logits.float().square().mean(), "both": loss + logits.float().square().mean()}
        of[look].backward()
        found.append(gradients(model))
    same(*found, **NEAR)


@pytest.mark.parametrize("on", ["1", "0"])
def test_memory_that_comes_back(driver, monkeypatch, on):  # noqa: F811
    """Graphs of the engine's are started again at addresses seen before: earlier logits stay what they were."""
    monkeypatch.setenv("ORTMODULE_ENABLE_CUDA_GRAPHS", on)
    monkeypatch.setattr("ortmodule.engine.session._empty", Cached().empty)
    wrapped, _ = pair(monkeypatch)
    expected, started = copy.deepcopy(wrapped._ortmodule.module), driver.fake_graphs()
    for step in range(STEADY + 4):
        wrapped(*batch_of(step))[0].backward()
    assert (driver.fake_graphs() > started) == (on == "1")
    outs = [wrapped(*batch_of(seed)) for seed in range(3)]
    assert all(type(out[1]) is Deferred for out in outs)
    for seed, out in enumerate(outs):
        torch.testing.assert_close(out[1].detach() + 0, expected(*batch_of(seed))[1])


def test_labels_that_begin_to_pay(driver, monkeypatch):  # noqa: F811
    """With all labels there is nothing to leave out: the logits are computed; with few they are not."""
    monkeypatch.setattr("ortmodule.runtime.lazy_logits.LEAST_WEIGHTS", 1)
    monkeypatch.setenv("ORTMODULE_DEFER_LOGITS", "auto")
    torch.manual_seed(0)
    wrapped = ORTModule(Language().train())
    expected, fused = copy.deepcopy(wrapped._ortmodule.module), []
    for step in range(12):
        batch = batch_of(step, BATCH * LENGTH if step < 8 else LABELLED)
        loss, _ = wrapped(*batch)
        loss.backward()
        gradients(wrapped)
        torch.testing.assert_close(loss, expected(*batch)[0])
        fused.append(rows_of_logits(wrapped) < BATCH * LENGTH)
    assert not any(fused[:8]) and fused[-1]


def test_few_plans_are_made_in_vain(driver, monkeypatch):  # noqa: F811
    """Where there is never padding, plans without the logits gain nothing: at some time no more are made."""
    wrapped, _ = pair(monkeypatch)
    ids, labels = batch_of()
    for rows in range(1, MOST_IN_VAIN + 4):
        assert leaves_out(wrapped(ids[:, : rows + 6], labels[:, : rows + 6])[1]) == HEAD
    made = [key[0] for key, found in graphs(wrapped)[0].plans.items() if key[3] == FORWARD and not found.plan.prologue]
    assert len(made) == MOST_IN_VAIN


def test_without_gradients_logits_are_there(driver, monkeypatch):  # noqa: F811
    wrapped, plain = pair(monkeypatch)
    with torch.no_grad():
        found = wrapped(*batch_of())[1]
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, plain(*batch_of())[1], **BITS)


@pytest.mark.parametrize("warm", ["deferred", "both"])
def test_a_capture_of_the_callers(driver, capture, monkeypatch, warm):  # noqa: F811
    """A graph of the caller's computes its logits in every replay, from what the inputs and weights are then."""
    monkeypatch.setenv("ORTMODULE_DISABLED_PASSES", "label_sparsity")  # which asks for a number
    monkeypatch.setattr("ortmodule.engine.session._empty", Kept())
    wrapped, _ = pair(monkeypatch)
    ids, labels = batch_of()
    for _ in range(2):
        wrapped(ids, labels)[0].backward()
    if warm == "both":
        graphs(wrapped)[0].executables.prepare((ids.shape, labels.shape), graphs(wrapped)[0].predicted())
    late = wrapped(ids, labels)[1]
    with capture:
        loss, logits = wrapped(ids, labels)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            late.sum()
    assert type(logits) is torch.Tensor
    expected = copy.deepcopy(wrapped._ortmodule.module)
    for seed in (3, 4):
        ids.copy_(batch_of(seed)[0])
        for model in (wrapped, expected):
            with torch.no_grad():
                model.head.weight.mul_(1.5)
        capture.replay()
        torch.testing.assert_close(logits.detach(), expected(ids, labels)[1])


# --- padding ----------------------------------------------------------------------------------------------------------


class Attending(Language):
    """The same behind attention with a mask of keys."""

    def __init__(self, p=0.0):
        super().__init__(p)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids, mask, labels):
        x = self.drop(self.embedding(ids))
        q, k, v = self.mix(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :].bool())
        logits = self.head(torch.tanh(self.layer(self.drop(x.transpose(1, 2).flatten(2)))))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def padded(seed=0, filled=True):
    torch.manual_seed(seed)
    ids, mask = torch.randint(WORDS, (BATCH, LENGTH)), torch.ones(BATCH, LENGTH, dtype=torch.int64)
    if filled:
        mask = (torch.arange(LENGTH) < torch.tensor([3, 16, 5, 1, 9, 2, 7, 4])[:, None]).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def leaves_out(logits):
    """What the run left out that these are of."""
    return {_WaitingHead: HEAD, _WaitingForward: FORWARD}[type(logits._source.waiting)]


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_padding_is_left_out_beside_logits(driver, monkeypatch, p):  # noqa: F811
    """Read later, logits are those of all tokens: forward runs again, with the same masks."""
    wrapped, plain = pair(monkeypatch, p, of=Attending)
    for step in range(STEADY + 2):
        found = []
        for model in (wrapped, plain):
            batch, before = padded(step), driver.fake_idle()
            out = model(*batch)
            assert model is plain or step < STEADY or driver.fake_idle() == before
            assert model is plain or leaves_out(out[1]) == FORWARD
            out[0].backward()
            found.append([out[0].detach(), *gradients(model)])
        same(*found, **NEAR)
    assert "padding_removal" in explain(wrapped).fused
    outs = []
    for model in (wrapped, plain):
        first, second = padded(), padded(1)
        torch.manual_seed(7)
        made = model(*first)[1], model(*second)[1]
        first[0].zero_()  # a buffer that the next batch is read into
        outs.append([x.detach() + 0 for x in made])
    same(*outs, **BITS)
    assert type(wrapped(*padded())[1]) is torch.Tensor  # from then on


def test_logits_that_are_kept_across_a_step(driver, monkeypatch):  # noqa: F811
    """They are computed once before the weights change; later runs keep what only the head is needed for."""
    wrapped, plain = pair(monkeypatch, of=Attending)
    expected = plain(*padded())[1].detach()
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.5)
    loss, logits = wrapped(*padded())
    assert leaves_out(logits) == FORWARD
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(logits.detach() + 0, expected, **BITS)
    graphs(wrapped)[0]._deferral.touched = False
    again = wrapped(*padded())[1]
    assert leaves_out(again) == HEAD
    expected = copy.deepcopy(wrapped._ortmodule.module)(*padded())[1]
    wrapped.mix.weight.data.mul_(2)  # not what the head reads
    torch.testing.assert_close(again + 0, expected)


def test_never_logits_of_other_weights(driver, monkeypatch):  # noqa: F811
    wrapped, _ = pair(monkeypatch, of=Attending)
    logits = wrapped(*padded())[1]
    wrapped.layer.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="weights that they depend on have changed"):
        logits.sum()


@pytest.mark.parametrize("look", ["logits", "both"])
def test_gradients_of_logits_of_padding(driver, monkeypatch, look):  # noqa: F811
    found = []
    for model in pair(monkeypatch, 0.3, of=Attending):
        torch.manual_seed(5)
        loss, logits = model(*padded())
        (logits.square().mean() + (loss if look == "both" else 0)).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    same(*found, **NEAR)


# --- digests ----------------------------------------------------------------------------------------------------------

CHANGES = {
    "one bit": lambda w: w.view(torch.uint8)[-1].bitwise_xor_(1),
    "sign": lambda w: w.neg_(),
    "order": lambda w: w.copy_(w.flip(0)),
    "data": lambda w: w.data.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 1])
def test_a_digest_tells_changes(driver, change, at):  # noqa: F811
    """Whatever the memory is aligned to; of one tensor among more than one launch has."""
    tensors = [torch.arange(1, n + 2, dtype=torch.int16)[at:] for n in (1, 5, 7, 300, 9000, *[8] * 140)]
    before = Digests(tensors)
    assert before.hold([t.clone() for t in tensors])
    for tensor in (tensors[1], tensors[4], tensors[-1]):
        kept = tensor.clone()
        CHANGES[change](tensor)
        assert not before.hold(tensors)
        tensor.copy_(kept)
    assert before.hold(tensors)


def test_bad_arguments_of_a_digest(driver):  # noqa: F811
    with pytest.raises(ValueError, match="found 0: expected int64"):
        _core.cuda_digests([torch.zeros(3)], torch.zeros(3), 0, 0)
    with pytest.raises(ValueError, match="not contiguous"):
        found = torch.zeros(1, _core.cuda_digest_parts, dtype=torch.int64)
        _core.cuda_digests([torch.zeros(3, 4).T], found, 0, 0)
