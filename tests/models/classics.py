"""Classics that are not in transformers, written in torch: image to image, generators, taggers, graphs, tables."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.trial import Subject

ROWS = (3, 4)


def _subject(make, operands):
    return Subject(make, lambda module, size, generator: operands(ROWS[size], generator), "classics")


# --- images -----------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    def __init__(self, width_in, width):
        super().__init__(
            nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, with the maps of the way down beside those of the way up."""

    def __init__(self, widths=(8, 16, 32)):
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(DoubleConv(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x, labels):
        kept = []
        for block in self.down:
            x = block(x if not kept else F.max_pool2d(x, 2))
            kept.append(x)
        for grow, up, beside in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = grow(x)
            if x.shape[-2:] != beside.shape[-2:]:
                x = F.interpolate(x, size=beside.shape[-2:], mode="bilinear")
            x = up(torch.cat([x, beside], 1))
        return F.cross_entropy(self.head(x), labels)


def _unet(rows, generator):
    side = 16 if rows == ROWS[0] else 24
    labels = torch.randint(0, 4, (rows, side, side), generator=generator)
    return {"x": torch.randn(rows, 3, side, side, generator=generator), "labels": labels}


class DCGAN(nn.Module):
    """Generator and discriminator with both losses in one step, the generator's output detached for one of them."""

    def __init__(self, latent=12, width=8):
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, 1, 0, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2, True),
            nn.Conv2d(2 * width, 1, 4, 1, 0, bias=False), nn.Flatten(),
        )  # fmt: skip

    def forward(self, images, noise):
        made = self.generator(noise[:, :, None, None])
        real, fake = self.discriminator(images), self.discriminator(made.detach())
        judged = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        judged = judged + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        fooled = self.discriminator(made)
        return judged + F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))


def _dcgan(rows, generator):
    images = torch.rand(rows, 3, 16, 16, generator=generator) * 2 - 1
    return {"images": images, "noise": torch.randn(rows, 12, generator=generator)}


class VAE(nn.Module):
    """The noise of the latent is an input, so that two runs can be compared."""

    def __init__(self, size=20, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 16), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(16, latent), nn.Linear(16, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, size))

    def forward(self, x, noise):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        made = self.decoder(mean + torch.exp(0.5 * log_variance) * noise)
        apart = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy_with_logits(made, x, reduction="sum") + apart


def _vae(rows, generator):
    return {"x": torch.rand(rows, 20, generator=generator), "noise": torch.randn(rows, 3, generator=generator)}


# --- sequences --------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Words and their lengths to a tag for every word; padding counts nowhere."""

    def __init__(self, words=30, tags=5):
        super().__init__()
        self.embed = nn.Embedding(words, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 8, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, tags)

    def forward(self, words, tags):
        scores = self.head(self.lstm(self.embed(words))[0])
        return F.cross_entropy(scores.transpose(1, 2), tags.masked_fill(words == 0, -100))


def _tagger(rows, generator):
    length = 2 * rows + 1
    words = torch.randint(1, 30, (rows, length), generator=generator)
    words[1:, length // 2 :] = 0
    return {"words": words, "tags": torch.randint(0, 5, (rows, length), generator=generator)}


# --- graphs and tables ------------------------------------------------------------------------------------------------


class GraphNet(nn.Module):
    """Mean of the messages along the edges, three rounds, then one vector for each graph of the batch."""

    def __init__(self, size=6, width=10):
        super().__init__()
        self.first = nn.Linear(size, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.message = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, nodes, edges, graph, labels):
        source, target = edges
        x = self.first(nodes)
        ones = torch.ones(source.shape[0], 1)
        degree = torch.zeros(x.shape[0], 1).index_add_(0, target, ones).clamp(min=1)
        for own, message in zip(self.own, self.message, strict=True):
            sent = torch.zeros_like(x).index_add_(0, target, message(x)[source])
            x = torch.relu(own(x) + sent / degree)
        index = graph[:, None].expand_as(x)
        pooled = torch.zeros(labels.shape[0], x.shape[1]).scatter_reduce(0, index, x, "amax", include_self=False)
        return F.cross_entropy(self.head(pooled), labels)


def _graph(rows, generator):
    count = 5 * rows
    edges = torch.randint(0, count, (2, 4 * count), generator=generator)
    nodes = torch.randn(count, 6, generator=generator)
    labels = torch.randint(0, 2, (rows,), generator=generator)
    return {"nodes": nodes, "edges": edges, "graph": torch.arange(count) // 5, "labels": labels}


class DLRM(nn.Module):
    """Dense features and bags of categories, with the products of all pairs."""

    def __init__(self, tables=(20, 15, 9), width=8):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in tables)
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse, labels):
        x = self.bottom(dense)
        parts = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = parts @ parts.transpose(1, 2)
        rows, columns = torch.tril_indices(parts.shape[1], parts.shape[1], -1)
        scores = self.top(torch.cat([x, products[:, rows, columns]], 1))
        return F.binary_cross_entropy_with_logits(scores.squeeze(1), labels)


def _dlrm(rows, generator):
    sparse = torch.randint(0, 9, (rows, 3, 4), generator=generator)
    labels = torch.randint(0, 2, (rows,), generator=generator).float()
    return {"dense": torch.randn(rows, 5, generator=generator), "sparse": sparse, "labels": labels}


CLASSICS = {
    "unet": _subject(UNet, _unet),
    "dcgan": _subject(DCGAN, _dcgan),
    "vae": _subject(VAE, _vae),
    "lstm-tagger": _subject(Tagger, _tagger),
    "graph-net": _subject(GraphNet, _graph),
    "dlrm": _subject(DLRM, _dlrm),
}
