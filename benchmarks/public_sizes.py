"""Lists rows of benchmarks/public_programs.py with the sizes that their programs train with.

They are rows whose shrunk models are slower than PyTorch's. Sizes are a program's defaults, or its README's; data
is random. Cora, which two of them read, has 2,708 papers, 1,433 words and 5,429 citations; a paper has about 18 words.
"""

import torch

from benchmarks.public_rows import Row, images, words

NODES, WORDS, EDGES, PAPER = 2708, 1433, 5429, 18
TABLES, ROWS, LOOKUPS, CLICKS = 8, 1_000_000, 100, 2048


def _citations(features, adjacency, sparse):
    """A graph of Cora's size with normalized edges in a sparse matrix. ``sparse``: so are the words."""

    def batch(size, g):
        at, words_at = torch.randint(NODES, (2, EDGES), generator=g), torch.randint(WORDS, (NODES, PAPER), generator=g)
        edges = torch.eye(NODES)
        edges[at[0], at[1]] = edges[at[1], at[0]] = 1.0
        edges = edges / edges.sum(1, keepdim=True)
        x = torch.zeros(NODES, WORDS).scatter_(1, words_at, 1 / PAPER)
        return {features: x.to_sparse() if sparse else x, adjacency: edges.to_sparse()}

    return batch


def _dlrm(find):
    import numpy

    m = find("dlrm/dlrm_s_pytorch.py")
    pairs = (TABLES + 1) * TABLES // 2  # of vectors that are multiplied with each other
    bottom, top = numpy.array([512, 512, 64]), numpy.array([64 + pairs, 1024, 1024, 1024, 1])
    return m.DLRM_Net(64, numpy.array([ROWS] * TABLES), bottom, top, arch_interaction_op="dot", sigmoid_top=3)


def _clicks(size, g):
    return {
        "dense_x": torch.randn(CLICKS, 512, generator=g),
        "lS_o": torch.arange(0, LOOKUPS * CLICKS, LOOKUPS).repeat(TABLES, 1),
        "lS_i": [torch.randint(ROWS, (LOOKUPS * CLICKS,), generator=g) for _ in range(TABLES)],
    }


def _bigram(find):
    m = find("makemore/makemore.py")
    return m.Bigram(m.ModelConfig(block_size=16, vocab_size=27, n_layer=4, n_embd=64, n_embd2=64, n_head=4))


_VIT = {"image_size": 256, "num_classes": 1000, "dim": 1024, "heads": 16, "mlp_dim": 2048, "dropout": 0.1}
_CAIT = {**_VIT, "patch_size": 32, "depth": 12, "cls_depth": 2, "emb_dropout": 0.1, "layer_dropout": 0.05}
_ATS = {**_VIT, "patch_size": 16, "depth": 6, "max_tokens_per_depth": (256, 128, 64, 32, 16, 8), "emb_dropout": 0.1}

_CALL = "a call's own cost in Python, 0.05 to 0.1 ms a step"
_SPARSE = (
    "what PyTorch runs inside the graph, products of sparse matrices, costs 0.2 to 0.4 ms a node more than they do"
)
_DATA = "data decides how many tokens a layer keeps: such layers, which PyTorch runs, break the graph"

#: By the name of the row: what its sizes are, and the row with them.
SIZES = {
    "pygcn: GCN": (
        "Cora's 2,708 nodes, 1,433 words, 16 hidden",
        Row("pygcn", "GCN", lambda find: find.package("pygcn", "pygcn.models").GCN(WORDS, 16, 7, 0.5),
            _citations("x", "adj", False)),
    ),
    "pytorch/examples: gcn": (
        "Cora's, 16 hidden, words in a sparse matrix",
        Row("pytorch/examples", "gcn", lambda find: find("examples/gcn/main.py").GCN(WORDS, 16, 7),
            _citations("input_tensor", "adj_mat", True), note=_SPARSE),
    ),
    "DLRM: DLRM_Net": (
        "8 tables of 1,000,000 by 64, 100 lookups, 2,048 clicks, layers 512-512-64 and 1024-1024-1024-1",
        Row("DLRM", "DLRM_Net", _dlrm, _clicks),
    ),
    "pytorch-cifar: EfficientNetB0": (
        "128 images of 32 x 32",
        Row("pytorch-cifar", "EfficientNetB0",
            lambda find: find.package("pytorch-cifar", "models").EfficientNetB0(), images("x", 3, 32, 32, rows=(128,))),
    ),
    "makemore: Bigram": (
        "32 names of 16 letters of 27",
        Row("makemore", "Bigram", _bigram, words("idx", "targets", rows=(32,), length=(16,), count=27),
            note=_CALL),
    ),
    "pytorch/examples: actor_critic": (
        "one state of 4 numbers, 128 hidden",
        Row("pytorch/examples", "actor_critic",
            lambda find: find("examples/reinforcement_learning/actor_critic.py").Policy(),
            lambda size, g: {"x": torch.randn(4, generator=g)}, note=_CALL),
    ),
    "vit-pytorch: cait.CaiT": (
        "an image of 256 x 256, 12 + 2 layers of 1024",
        Row("vit-pytorch", "cait.CaiT", lambda find: find("vit_pytorch.cait").CaiT(**_CAIT),
            images("img", 3, 256, 256, rows=(1,))),
    ),
    "vit-pytorch: ats_vit.ViT": (
        "four images of 256 x 256, 6 layers of 1024",
        Row("vit-pytorch", "ats_vit.ViT", lambda find: find("vit_pytorch.ats_vit").ViT(**_ATS),
            images("img", 3, 256, 256, rows=(4,)), note=_DATA),
    ),
}  # fmt: skip
