"""Teaches a ViT scikit-learn's handwritten digits, with transformers' Trainer.

python -m examples.recipes.image_classification --backend ortmodule
"""

import torch
import transformers
from sklearn.datasets import load_digits

from examples.recipes.shared import arguments, losses, parse, report, wrapped


def accuracy(outputs):
    return {"accuracy": float((outputs.predictions.argmax(-1) == outputs.label_ids).mean())}


def main(argv=None):
    settings = parse(argv, steps=200, batch_size=32)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"pixel_values": images[i], "labels": int(digits.target[i])} for i in order]
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, num_labels=10,
    )  # fmt: skip
    model = wrapped(transformers.ViTForImageClassification(config), settings)
    trainer = transformers.Trainer(
        model=model,
        args=arguments(settings),
        train_dataset=rows[360:],
        eval_dataset=rows[:360],
        compute_metrics=accuracy,
    )
    trainer.train()
    found = trainer.evaluate()["eval_accuracy"]
    return report("image_classification", settings, model, losses(trainer), accuracy=found)


if __name__ == "__main__":
    main()
