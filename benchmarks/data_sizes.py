"""Measures models in which hidden states decide how many rows a layer goes on with.

    python -m benchmarks.data_sizes [--steps 24] [--threads 1]

Rows:

    experts   four layers of attention and four experts, each of which takes the rows of a mask
    pruned    four layers, behind each of which a mask of scores drops about half of the rows
    chosen    the same, where Python chooses the rows by the scores: PyTorch runs that submodule

Printed are milliseconds of a step, forward and backward, of PyTorch and of ORTModule, in turns (medians), their ratio,
and what `explain()` says.
"""

import argparse
import logging
import time
import warnings
from statistics import median

import torch
from torch import nn

from ortmodule import Config, ORTModule, explain

WARM = 12  # steps that are not counted: graphs are made


class Experts(nn.Module):
    def __init__(self, width, count=4):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            found[rows] += weights[rows, place, None] * expert(flat[rows])
        return found.reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.experts = Experts(width)

    def forward(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.experts(self.second(x))


class Masked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        scores = self.score(x).squeeze(-1)
        kept = scores > 0
        return x[kept] * scores[kept, None].sigmoid()


class Chosen(Masked):
    def forward(self, x):
        scores = self.score(x).squeeze(-1)
        rows = [i for i, score in enumerate(scores.tolist()) if score > 0] or [0]
        return x[rows] * scores[rows, None].sigmoid()


class Pruned(nn.Module):
    def __init__(self, width, kind, count=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
            for _ in range(count)
        )
        self.kept = nn.ModuleList(kind(width) for _ in range(count))

    def forward(self, x):
        for layer, kept in zip(self.layers, self.kept, strict=True):
            x = kept(layer(x) + x)
        return x.sum(0)


#: (the model, the sizes of its input)
ROWS = {
    "experts": (lambda: nn.Sequential(*(Layer(128) for _ in range(4))), (8, 64, 128)),
    "pruned": (lambda: Pruned(256, Masked), (512, 256)),
    "chosen": (lambda: Pruned(256, Chosen), (512, 256)),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--steps", 24), ("--threads", 1)):
        parser.add_argument(name, type=int, default=value)
    given = parser.parse_args()
    logging.getLogger("ortmodule").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(given.threads)
    for name, (make, sizes) in ROWS.items():
        torch.manual_seed(0)
        eager = make()
        # The figure is of what runs after the captures: none of them waits for others to pay.
        ours, took = ORTModule(make(), config=Config(capture_share=float("inf"))), ([], [])
        for number in range(WARM + given.steps):
            x = torch.randn(sizes, generator=torch.Generator().manual_seed(number))
            for model, seconds in zip((eager, ours), took, strict=True):
                start = time.perf_counter()
                model(x).square().mean().backward()
                seconds.append(time.perf_counter() - start)
        theirs, own = (1e3 * median(seconds[WARM:]) for seconds in took)
        report = explain(ours)
        said = f"breaks: {', '.join(report.breaks) or 'none'}" if report.captured else f"PyTorch: {report.fallback}"
        print(f"{name:8} PyTorch {theirs:6.1f} ms  ORTModule {own:6.1f} ms  {own / theirs:.2f}  {said}", flush=True)


if __name__ == "__main__":
    main()
