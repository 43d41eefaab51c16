"""Trains a small GPT-2 on Python's reference with Lightning: the network is wrapped, not the LightningModule.

python -m examples.recipes.lightning_module --backend ortmodule
"""

import lightning
import torch

from examples.recipes.shared import batches, language_model, paragraphs, parse, report, tokenizer, wrapped


class LanguageModel(lightning.LightningModule):
    def __init__(self, network, lr):
        super().__init__()
        self.network, self.lr, self.losses = network, lr, []

    def training_step(self, batch, index):
        loss = self.network(**batch).loss  # what training_step calls is what is to be wrapped
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.network.parameters(), lr=self.lr)


def main(argv=None):
    settings = parse(argv)
    words = tokenizer(paragraphs())
    network = wrapped(language_model(len(words)), settings)
    module = LanguageModel(network, settings.lr)
    trainer = lightning.Trainer(
        max_steps=settings.steps, accelerator="auto", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, default_root_dir=settings.out,
    )  # fmt: skip
    trainer.fit(module, batches(words, settings))
    return report("lightning_module", settings, network, module.losses)


if __name__ == "__main__":
    main()
