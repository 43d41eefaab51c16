"""Runs a script as it was written for ONNX Runtime's ORTModule: no line knows of this project.

python -m ortmodule.compat enable        # once; "disable" takes it back
python -m examples.recipes.original_script
"""

import argparse

import torch
from onnxruntime import set_seed
from onnxruntime.training import ORTModule
from onnxruntime.training.optim import FusedAdam
from onnxruntime.training.ortmodule import DebugOptions, LogLevel
from sklearn.datasets import load_digits


class NeuralNet(torch.nn.Module):
    def __init__(self, input_size, hidden_size, num_classes):
        super().__init__()
        self.fc1 = torch.nn.Linear(input_size, hidden_size)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(hidden_size, num_classes)

    def forward(self, input1):
        return self.fc2(self.relu(self.fc1(input1)))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--pytorch-only", action="store_true", help="without ORTModule")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    set_seed(0)
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    model = NeuralNet(64, 128, 10)
    if not args.pytorch_only:
        model = ORTModule(model, DebugOptions(log_level=LogLevel.WARNING))
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    for _ in range(args.steps):
        chosen = torch.randint(0, 1400, (args.batch_size,))
        loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = float((model(images[1400:]).argmax(-1) == labels[1400:]).float().mean())
    print(f"loss {loss.item():.3f}, accuracy {right:.3f}")
    return model, right


if __name__ == "__main__":
    main()
