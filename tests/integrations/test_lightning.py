"""Lightning's Trainer and Fabric with a wrapped module, or inside one: what is trained, saved and resumed is PyTorch's.

The data are images of digits.
"""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.optim import FusedAdam
from tests.integrations.small import WORK, assert_in_engine

lightning = pytest.importorskip("lightning.pytorch")
datasets = pytest.importorskip("sklearn.datasets")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and logging
ROWS, BATCH = 40, 8
STEPS = 2 * ROWS // BATCH  # of two epochs


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))


class Classifier(lightning.LightningModule):
    def __init__(self, model, fused):
        super().__init__()
        self.model, self.fused, self.losses = model, fused, []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        cls = FusedAdam if self.fused else torch.optim.AdamW
        settings = {"adam_w_mode": 2} if self.fused else {}
        optimizer = cls(self.model.parameters(), lr=1e-2, eps=1e-8, weight_decay=0.01, **settings)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def loader():
    found = datasets.load_digits()
    pixels = torch.tensor(found.data[:ROWS], dtype=torch.float32) / 16
    rows = list(zip(pixels, found.target[:ROWS].tolist(), strict=True))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def trainer_of(folder, epochs, **settings):
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **settings,
    )  # fmt: skip


# (Lightning refuses to clip where the optimizer could unscale gradients by itself, as PyTorch's fused ones can.)
@pytest.mark.parametrize(("precision", "clip", "tolerance"), [("32-true", 1.0, 1e-5), ("bf16-mixed", None, 3e-2)])
def test_training(precision, clip, tolerance, tmp_path):
    found = []
    for wrap in (ORTModule, lambda model: model):
        module = Classifier(wrap(network()), fused=wrap is ORTModule)
        trainer = trainer_of(
            tmp_path, 2, precision=precision, gradient_clip_val=clip, accumulate_grad_batches=2
        )  # fmt: skip
        trainer.fit(module, loader(), loader())
        found.append((module, trainer))
    (ours, trainer), (theirs, _) = found
    assert_in_engine(ours.model, STEPS)
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(theirs.losses), rtol=tolerance, atol=tolerance)
    accuracy = [trainer.callback_metrics["accuracy"].item() for _, trainer in found]
    assert accuracy[0] == pytest.approx(accuracy[1], abs=0.03)

    path = tmp_path / "saved.ckpt"
    trainer.save_checkpoint(path)
    plain = Classifier(network(), fused=False)
    plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])  # names without a prefix
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    assert copy.deepcopy(ours).model(torch.ones(2, 64)).shape == (2, 10)
    assert_resumed_alike(lambda: Classifier(ORTModule(network()), fused=True), ours, path, precision)


def assert_resumed_alike(make, ours, path, precision="32-true"):
    """From the checkpoint, a new module has in the next epoch the losses that the module that was saved would have."""
    again, longer = make(), []
    for module in (again, ours):
        module.losses.clear()
        trainer = trainer_of(path.parent, 3, precision=precision)
        trainer.fit(module, loader(), ckpt_path=path, weights_only=False)
        longer.append(torch.stack(module.losses))
    assert len(longer[0]) == STEPS // 2
    torch.testing.assert_close(*longer, rtol=1e-5, atol=1e-5)


class Whole(lightning.LightningModule):
    """Its own forward is the network."""

    def __init__(self):
        super().__init__()
        self.network, self.losses = network(), []

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.full
def test_a_lightning_module_that_is_wrapped_as_a_whole(tmp_path):
    """Its training_step calls itself, and that is the wrapper."""
    found = []
    for wrap in (ORTModule, lambda module: module):
        trainer, module = trainer_of(tmp_path, 2), wrap(Whole())
        trainer.fit(module, loader())
        path = tmp_path / f"{type(module).__name__}-{isinstance(module, ORTModule)}.ckpt"
        trainer.save_checkpoint(path)
        found.append((module, path))
    (ours, path), (theirs, _) = found
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(theirs.losses))
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (STEPS, 0, 0)
    assert report.weights_in_engine >= WORK
    plain = Whole()
    plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    torch.testing.assert_close(plain.state_dict(), ours.state_dict(), rtol=0, atol=0)
    assert_resumed_alike(lambda: ORTModule(Whole()), ours, path)


@pytest.mark.full
def test_fabric(tmp_path):
    from lightning.fabric import Fabric

    def train(wrap, epochs, path=None):
        """The wrapped network, and its losses; from a checkpoint, if there is one."""
        fabric, losses = Fabric(accelerator="cpu", devices=1), []
        own = wrap(network())
        model, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer}
        if path is not None:
            fabric.load(path, state)
        for epoch in range(epochs):
            for x, y in fabric.setup_dataloaders(loader()):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            if path is None and epoch == 1:
                fabric.save(tmp_path / f"{isinstance(own, ORTModule)}.ckpt", state)
        return own, torch.stack(losses)

    (ours, losses), (_, expected) = train(ORTModule, 3), train(lambda module: module, 3)
    torch.testing.assert_close(losses, expected)
    assert_in_engine(ours, len(losses))
    path = tmp_path / "True.ckpt"
    plain = network()
    plain.load_state_dict(torch.load(path, weights_only=True)["model"])
    for wrap in (ORTModule, lambda module: module):  # it goes on, here and without us
        _, resumed = train(wrap, 1, path)
        torch.testing.assert_close(resumed, losses[STEPS:])
