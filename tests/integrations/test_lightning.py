"""Lightning's Trainer with a wrapped module inside a LightningModule: what it trains, saves and loads is PyTorch's."""

import copy

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, explain
from ortmodule.optim import FusedAdam

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and logging


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3))


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
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=generator)
    return torch.utils.data.DataLoader([(row, int(row[0] > 0) + int(row[1] > 0)) for row in x], batch_size=8)


# (Lightning refuses to clip where the optimizer could unscale gradients by itself, as PyTorch's fused ones can.)
@pytest.mark.parametrize(("precision", "clip", "tolerance"), [("32-true", 1.0, 1e-5), ("bf16-mixed", None, 3e-2)])
def test_training(precision, clip, tolerance, tmp_path):
    found = []
    for wrap in (ORTModule, lambda model: model):
        module = Classifier(wrap(network()), fused=wrap is ORTModule)
        trainer = lightning.Trainer(
            max_epochs=3, precision=precision, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, gradient_clip_val=clip, accumulate_grad_batches=2, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, loader(), loader())
        found.append((module, trainer))
    (ours, trainer), (theirs, _) = found
    assert explain(ours.model).captured, explain(ours.model).fallback
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(theirs.losses), rtol=tolerance, atol=tolerance)
    accuracy = [trainer.callback_metrics["accuracy"].item() for _, trainer in found]
    assert accuracy[0] == pytest.approx(accuracy[1], abs=0.03)

    path = tmp_path / "saved.ckpt"
    trainer.save_checkpoint(path)
    plain = Classifier(network(), fused=False)
    plain.load_state_dict(torch.load(path, weights_only=False)["state_dict"])  # names without a prefix
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
    assert copy.deepcopy(ours).model(torch.ones(2, 8)).shape == (2, 3)


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
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        module = wrap(Whole())
        trainer.fit(module, loader())
        found.append(module)
    ours, theirs = found
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(theirs.losses))
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (10, 0, 0)


@pytest.mark.full
def test_fabric(tmp_path):
    from lightning.fabric import Fabric

    found = []
    for wrap in (ORTModule, lambda module: module):
        fabric, losses = Fabric(accelerator="cpu", devices=1), []
        own = wrap(network())
        model, optimizer = fabric.setup(own, torch.optim.AdamW(own.parameters(), lr=1e-2))
        for _ in range(2):
            for x, y in fabric.setup_dataloaders(loader()):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        found.append((own, torch.stack(losses)))
        fabric.save(tmp_path / "saved.ckpt", {"model": model})
    (ours, losses), (theirs, expected) = found
    torch.testing.assert_close(losses, expected)
    assert explain(ours).engine_calls == 10 and explain(ours).unreached_steps == 0
    plain = network()
    plain.load_state_dict(torch.load(tmp_path / "saved.ckpt", weights_only=True)["model"])
    torch.testing.assert_close(plain.state_dict(), theirs.state_dict())
