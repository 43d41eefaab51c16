"""Draws how much of a training each rank waits for others, with DistributedSampler and with balanced batches.

    python -m examples.balanced_batches.idle_time --ranks 4 --batch-size 16

The texts are WordNet's glosses (Debian's package wordnet-base), or the lines of --text. A batch is padded to its
longest text, and a step takes as long as the largest batch of all ranks. The picture goes to <out>/idle_time.png.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler

from examples.finetune_text_classifier.data import read_glosses
from ortmodule.utils.data import LoadBalancingDistributedSampler


def padded_work(indices, lengths, batch):
    """Of each batch of one rank: its samples times the longest of them."""
    batches = [indices[i : i + batch] for i in range(0, len(indices), batch)]
    return [len(b) * max(lengths[i] for i in b) for b in batches]


def idle(samplers, lengths, batch):
    """The part of the epoch that each rank waits, in percent."""
    work = torch.tensor([padded_work(list(sampler), lengths, batch) for sampler in samplers], dtype=torch.float64)
    steps = work.max(0).values
    return (100 * (steps - work).sum(1) / steps.sum()).tolist()


def draw(waits, folder):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    width = 0.8 / len(waits)
    for i, (name, percents) in enumerate(waits.items()):
        places = [rank + (i + 0.5) * width - 0.4 for rank in range(len(percents))]
        axes.bar(places, percents, width, label=name)
    axes.set(xlabel="rank", ylabel="idle, % of the epoch", xticks=range(len(percents)), ylim=(0, None))
    axes.legend()
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / "idle_time.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--text", type=Path, help="a file with one sample a line")
    parser.add_argument("--out", default="results/balanced_batches")
    args = parser.parse_args(arguments)
    texts = args.text.read_text().splitlines() if args.text else [gloss for gloss, _ in read_glosses()]
    lengths = [max(1, len(text.split())) for text in texts]
    ranks = range(args.ranks)
    samplers = {
        "DistributedSampler": [DistributedSampler(lengths, args.ranks, rank) for rank in ranks],
        "LoadBalancingDistributedSampler": [
            LoadBalancingDistributedSampler(lengths, lambda length: length, args.ranks, rank) for rank in ranks
        ],
    }
    waits = {name: idle(each, lengths, args.batch_size) for name, each in samplers.items()}
    for name, percents in waits.items():
        print(f"{name}: idle {', '.join(f'{percent:.1f}' for percent in percents)} %")
    print(f"picture: {draw(waits, args.out)}")


if __name__ == "__main__":
    main()
