"""accelerate's plain loop with a wrapped model: prepare, accumulate, clip, save_state, load_state."""

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

from ortmodule import ORTModule  # noqa: E402
from tests.integrations.small import assert_in_engine, assert_same_weights, llama, sentences, tokenizer  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
BATCH, SAVED = 4, 4  # steps before a checkpoint


def data():
    rows = tokenizer()(sentences()[:32], padding="max_length", truncation=True, max_length=24, return_tensors="pt")
    ids, mask = rows["input_ids"], rows["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    made = [dict(input_ids=i, attention_mask=m, labels=y) for i, m, y in zip(ids, mask, labels, strict=True)]
    return torch.utils.data.DataLoader(made, batch_size=BATCH)


def train(model, precision, folder, resumed=False):
    """Losses of the steps, all or those after the checkpoint, and the model as it was prepared."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data())
    found = []
    if resumed:
        accelerator.load_state(folder)
    for step, batch in enumerate(loader):
        if resumed and step < SAVED:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
        if step + 1 == SAVED and not resumed:
            accelerator.save_state(folder, safe_serialization=True)
    return found, accelerator.unwrap_model(model)


@pytest.fixture(autouse=True)
def fresh():
    """accelerate has one state in a process, with the precision that came first."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.full
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 3e-2)])
def test_training_saving_and_resuming(precision, tolerance, tmp_path):
    roads = (("ours", ORTModule), ("theirs", lambda model: model))
    made = [train(wrap(llama()), precision, tmp_path / name) for name, wrap in roads]
    (ours, model), (theirs, _) = made
    assert isinstance(model, ORTModule) and ours == pytest.approx(theirs, rel=tolerance)
    assert_in_engine(model, len(ours))
    again, _ = train(ORTModule(llama()), precision, tmp_path / "ours", resumed=True)
    assert again == pytest.approx(ours[SAVED:], rel=tolerance)
    model.save_pretrained(tmp_path / "plain")
    assert_same_weights(type(llama()).from_pretrained(tmp_path / "plain"), model)
