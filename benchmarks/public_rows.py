"""Lists the rows of benchmarks/public_programs.py: models of public programs, how each is made, and its batches.

Programs that are packages are imported where they are installed. Others are single files, or folders of files, in a
folder of sources. Many of these are scripts, which read arguments and data when they are run: of such a file the
imports, the classes and the functions are taken.
"""

import __future__

import ast
import importlib
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

WORDS, LENGTH = 61, 24


@dataclass(frozen=True)
class Row:
    """``build(find)``: a module; ``find`` gives one by the name of a package, or the path of a file in the sources.
    ``batch(size, generator)``: the arguments by name, of two sizes: 0 and 1. ``double``: it trains in float64.
    ``note``: why it has islands, what PyTorch's calls do, or where a difference comes from."""

    program: str
    model: str
    build: Callable
    batch: Callable
    double: bool = False
    note: str = ""


class Sources:
    """Finds modules of programs."""

    def __init__(self, folder):
        self._folder, self._found = None if folder is None else Path(folder).resolve(), {}

    def __call__(self, name, **given):
        """``given``: variables that a file's own lines would have set."""
        key = name, *sorted(given.items())
        if key not in self._found:
            self._found[key] = self._read(name, given) if name.endswith(".py") else importlib.import_module(name)
        return self._found[key]

    def package(self, folder, name):
        """The package of this name in a folder of the sources."""
        if str(self._at(folder)) not in sys.path:
            sys.path.insert(0, str(self._at(folder)))
        return self(name)

    def _at(self, name):
        if self._folder is None or not (self._folder / name).exists():
            raise FileNotFoundError(f"{name} is not in the folder of sources (--sources)")
        return self._folder / name

    def _read(self, name, given):
        path = self._at(name)
        tree = ast.parse(path.read_text()).body
        names = [each.name for node in tree if getattr(node, "module", "") == "__future__" for each in node.names]
        flags = sum(getattr(__future__, name).compiler_flag for name in names)
        module = types.ModuleType(f"{path.parent.name}_{path.stem}".replace("-", "_"))
        module.__file__ = str(path)
        vars(module).update(given)
        sys.modules[module.__name__] = module
        known, sys.path[:0] = set(sys.modules), [str(path.parent)]
        try:
            for node in tree:
                _take(node, module, flags)
        finally:
            sys.path.remove(str(path.parent))
            # Another program has files of the same names.
            for other in [n for n in set(sys.modules) - known if self._is_ours(sys.modules[n])]:
                del sys.modules[other]
        return module

    def _is_ours(self, module):
        return str(getattr(module, "__file__", None)).startswith(str(self._folder))


def _take(node, module, flags):
    taken = isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef))
    if taken or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
        code = compile(ast.Module([node], []), module.__file__, "exec", flags, dont_inherit=True)
        try:
            exec(code, vars(module))
        except (ImportError, SystemExit):  # of data, drawings, reports: what needs it fails by name
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                raise


# --- batches ----------------------------------------------------------------------------------------------------------


def images(name, *shape, rows=(2, 3)):
    return lambda size, g: {name: torch.randn(rows[size], *shape, generator=g)}


def words(name="idx", targets=None, rows=(2, 3), length=(LENGTH, LENGTH), count=WORDS):
    def batch(size, g):
        made = torch.randint(count, (rows[size], length[size] + 1), generator=g)
        return {name: made[:, :-1]} | ({targets: made[:, 1:].contiguous()} if targets else {})

    return batch


def graph(features, adjacency, nodes=(20, 20), width=12, sparse=False):
    """A random graph with normalized edges."""

    def batch(size, g):
        n = nodes[size]
        edges = (torch.rand(n, n, generator=g) < 0.2).float()
        edges = (edges + edges.T + torch.eye(n)).clamp(max=1)
        edges = edges / edges.sum(1, keepdim=True)
        return {features: torch.randn(n, width, generator=g), adjacency: edges.to_sparse() if sparse else edges}

    return batch


# --- vit-pytorch ------------------------------------------------------------------------------------------------------

_SMALL = {"num_classes": 7, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
_VIT = {"image_size": 32, "patch_size": 8, **_SMALL}
_VIDEO = {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, **_SMALL}
_STAGES = {"num_classes": 7, "dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1)}

_LAYERS = "Python decides by a drawn tensor which layers run (`layer_dropout`); each layer is a graph of its own"


def _vit(file, name, argument="img", shape=(3, 32, 32), wrap=None, said="", note="", **options):
    def build(find):
        made = getattr(find(f"vit_pytorch.{file}"), name)(**options)
        return made if wrap is None else wrap(find, made)

    return Row("vit-pytorch", f"{file}.{name}{said}", build, images(argument, *shape), note=note)


def mae(find, encoder):
    return find("vit_pytorch.mae").MAE(encoder=encoder, masking_ratio=0.75, decoder_dim=32, decoder_depth=1)


VITS = [
    _vit("vit", "ViT", **_VIT, dropout=0.1, emb_dropout=0.1),
    _vit("vit", "ViT", wrap=mae, said=", mae", **_VIT, pool="mean"),
    _vit("simple_vit", "SimpleViT", **_VIT),
    _vit("deepvit", "DeepViT", **_VIT, dropout=0.1),
    _vit("cait", "CaiT", **_VIT, cls_depth=1, dropout=0.1, layer_dropout=0.05, note=_LAYERS),
    _vit("cait", "CaiT", said=", all layers", **_VIT, cls_depth=1, dropout=0.1),
    _vit("t2t", "T2TViT", image_size=32, num_classes=7, dim=32, depth=2, heads=2, mlp_dim=48,
         t2t_layers=((7, 4), (3, 2))),
    _vit("cct", "CCT", "x", img_size=(32, 32), embedding_dim=32, n_conv_layers=2, num_layers=2, num_heads=2,
         mlp_ratio=2.0, num_classes=7, positional_embedding="learnable"),
    _vit("cross_vit", "CrossViT", image_size=32, num_classes=7, depth=1, sm_dim=16, sm_patch_size=8, sm_enc_depth=1,
         sm_enc_heads=2, sm_enc_mlp_dim=32, lg_dim=24, lg_patch_size=16, lg_enc_depth=1, lg_enc_heads=2,
         lg_enc_mlp_dim=32, cross_attn_depth=1, cross_attn_heads=2),
    _vit("pit", "PiT", image_size=32, patch_size=8, dim=32, num_classes=7, depth=(1, 1), heads=2, mlp_dim=48),
    _vit("levit", "LeViT", image_size=64, num_classes=7, stages=2, dim=(32, 48), depth=1, heads=(2, 3), mlp_mult=2,
         shape=(3, 64, 64)),
    _vit("cvt", "CvT", "x", (3, 64, 64), num_classes=7, s1_emb_dim=16, s2_emb_dim=24, s3_emb_dim=32, s3_depth=1,
         s2_depth=1),
    _vit("twins_svt", "TwinsSVT", "x", (3, 64, 64), num_classes=7, s1_emb_dim=16, s1_local_patch_size=4, s1_global_k=4,
         s2_emb_dim=16, s2_local_patch_size=4, s2_global_k=4, s3_emb_dim=24, s3_local_patch_size=2, s3_global_k=2,
         s3_depth=1, s4_emb_dim=24, s4_local_patch_size=2, s4_global_k=2, s4_depth=1),
    _vit("crossformer", "CrossFormer", "x", (3, 64, 64), **_STAGES, global_window_size=(4, 2, 2, 1),
         local_window_size=2),
    _vit("regionvit", "RegionViT", "x", (3, 56, 56), **_STAGES, window_size=7),
    _vit("scalable_vit", "ScalableViT", shape=(3, 64, 64), num_classes=7, dim=16, heads=(1, 2, 2, 2),
         depth=(1, 1, 1, 1), ssa_dim_key=(8, 8, 8, 8), reduction_factor=(4, 2, 2, 1), window_size=(8, 4, None, None)),
    _vit("sep_vit", "SepViT", "x", (3, 112, 112), num_classes=7, dim=8, dim_head=8, heads=(1, 1, 2, 2),
         depth=(1, 1), window_size=7),
    _vit("max_vit", "MaxViT", "x", (3, 56, 56), num_classes=7, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1),
         window_size=7),
    _vit("nest", "NesT", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1),
         num_classes=7),
    _vit("mobile_vit", "MobileViT", "x", (3, 64, 64), image_size=(64, 64), dims=[16, 24, 32], num_classes=7,
         channels=[8, 16, 16, 16, 24, 24, 32, 32, 48, 48, 64]),
    _vit("xcit", "XCiT", **_VIT, cls_depth=1, layer_dropout=0.05, note=_LAYERS),
    _vit("vit_with_patch_merger", "ViT", **_VIT, patch_merge_layer=1, patch_merge_num_tokens=4),
    _vit("vit_for_small_dataset", "ViT", **_VIT),
    _vit("parallel_vit", "ViT", **_VIT),
    _vit("local_vit", "LocalViT", **_VIT),
    _vit("rvt", "RvT", **_VIT),
    _vit("vivit", "ViViT", "video", (3, 4, 16, 16), image_size=16, image_patch_size=8, frames=4, frame_patch_size=2,
         num_classes=7, dim=32, spatial_depth=1, temporal_depth=1, heads=2, mlp_dim=48),
    _vit("vit_3d", "ViT", "video", (3, 4, 16, 16), **_VIDEO),
    _vit("vit_1d", "ViT", "series", (3, 64), seq_len=64, patch_size=8, **_SMALL),
    _vit("look_vit", "LookViT", dim=32, image_size=32, num_classes=7, depth=1, patch_size=16, heads=2,
         highres_patch_size=8, cross_attn_heads=2, dropout=0.0),
    _vit("ats_vit", "ViT", **_VIT, max_tokens_per_depth=(12, 8)),
    _vit("normalized_vit", "nViT", "images", **_VIT),
    _vit("simple_uvit", "SimpleUViT", **_VIT),
    _vit("simple_vit_with_fft", "SimpleViT", **_VIT, freq_patch_size=8),
    _vit("simple_vit_with_patch_dropout", "SimpleViT", **_VIT),
    _vit("simple_vit_with_value_residual", "SimpleViT", **_VIT),
    _vit("simple_flash_attn_vit", "SimpleViT", **_VIT),
    _vit("vit_with_keel_post_ln", "ViT", **_VIT),
]  # fmt: skip


# --- x-transformers, diffusion ----------------------------------------------------------------------------------------


def _decoder(model, kind="Decoder", wrapped=True, **options):
    def build(find):
        x = find("x_transformers")
        net = x.TransformerWrapper(
            num_tokens=WORDS, max_seq_len=64, attn_layers=getattr(x, kind)(dim=32, depth=2, heads=2, **options)
        )
        return x.AutoregressiveWrapper(net) if wrapped else net

    return Row("x-transformers", model, build, words("x"))


TRANSFORMERS = [
    _decoder("decoder"),
    _decoder("encoder", "Encoder", wrapped=False),
    _decoder("rotary, RMSNorm, SwiGLU", rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True),
    _decoder("ALiBi", alibi_pos_bias=True, alibi_num_heads=1),
    _decoder("T5's relative bias", rel_pos_bias=True),
    _decoder("flash, grouped queries", attn_flash=True, attn_kv_heads=1),
    _decoder("norms of queries and keys", attn_qk_norm=True),
    _decoder("gated residual, sandwich norm", gate_residual=True, sandwich_norm=True),
    _decoder("shifted tokens, talking heads", shift_tokens=1, attn_pre_talking_heads=True),
    Row("x-transformers", "ViTransformerWrapper", lambda find: find("x_transformers").ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=7,
        attn_layers=find("x_transformers").Encoder(dim=32, depth=2, heads=2)), images("img", 3, 32, 32)),
    Row("x-transformers", "XTransformer", lambda find: find("x_transformers").XTransformer(
        dim=32, enc_num_tokens=WORDS, enc_depth=1, enc_heads=2, enc_max_seq_len=64, dec_num_tokens=WORDS, dec_depth=1,
        dec_heads=2, dec_max_seq_len=64),
        lambda size, g: {**words("src")(size, g), **words("tgt")(size, g)}),
]  # fmt: skip

_UNET = "denoising_diffusion_pytorch.denoising_diffusion_pytorch"
DIFFUSION = [
    Row("denoising-diffusion-pytorch", "Unet", lambda find: find(_UNET).Unet(dim=8, dim_mults=(1, 2)),
        lambda size, g: {**images("x", 3, 16, 16)(size, g), "time": torch.randint(100, (2 + size,), generator=g)}),
    Row("denoising-diffusion-pytorch", "GaussianDiffusion", lambda find: find(_UNET).GaussianDiffusion(
        find(_UNET).Unet(dim=8, dim_mults=(1, 2)), image_size=16, timesteps=100), images("img", 3, 16, 16)),
    Row("denoising-diffusion-pytorch", "GaussianDiffusion1D",
        lambda find: find("denoising_diffusion_pytorch").GaussianDiffusion1D(
            find("denoising_diffusion_pytorch").Unet1D(dim=8, dim_mults=(1, 2), channels=4), seq_length=32,
            timesteps=100, objective="pred_v"), images("img", 4, 32)),
]  # fmt: skip


# --- files of sources -------------------------------------------------------------------------------------------------


def _nano(find):
    m = find("nanoGPT/model.py")
    return m.GPT(m.GPTConfig(block_size=32, vocab_size=WORDS, n_layer=2, n_head=2, n_embd=32, dropout=0.1))


def _mini(find):
    m = find.package("minGPT", "mingpt.model")
    config = m.GPT.get_default_config()
    config.model_type, config.vocab_size, config.block_size = "gpt-nano", WORDS, 32
    return m.GPT(config)


def _makemore(name, *given):
    def build(find):
        m = find("makemore/makemore.py")
        config = m.ModelConfig(block_size=LENGTH, vocab_size=WORDS, n_layer=2, n_embd=32, n_embd2=32, n_head=2)
        return getattr(m, name)(config, *given)

    return Row("makemore", " ".join([name, *given]), build, words("idx", "targets"))


def _cifar(name, *given, note=""):
    return Row("pytorch-cifar", name + "".join(f" {each}" for each in given),
               lambda find: getattr(find.package("pytorch-cifar", "models"), name)(*given),
               images("x", 3, 32, 32), note=note)  # fmt: skip


DENSENET = (
    "of the ReLUs' operands in one batch 25 are on the other side of 0 than in float64, PyTorch's 18; on the sides "
    "that it took, each gradient is within 1.6e-5 of the exact one, PyTorch's within 1.8e-5"
)


def _example(model, file, make, batch, double=False, note="", **given):
    return Row(
        "pytorch/examples", model, lambda find: make(find(f"examples/{file}", **given)), batch, double, note=note
    )


def _dlrm(find):
    import numpy

    m = find("dlrm/dlrm_s_pytorch.py")
    sizes = numpy.array([30, 20, 40]), numpy.array([13, 16, 8]), numpy.array([14, 16, 1])
    return m.DLRM_Net(8, sizes[0], sizes[1], sizes[2], arch_interaction_op="dot", sigmoid_top=1)


def _clicks(size, g):
    rows = (4, 6)[size]
    return {
        "dense_x": torch.randn(rows, 13, generator=g),
        "lS_o": torch.arange(0, 2 * rows, 2).repeat(3, 1),
        "lS_i": [torch.randint(20, (2 * rows,), generator=g) for _ in range(3)],
    }


def _mamba_minimal(find):
    m = find("mamba-minimal/model.py")
    return m.Mamba(m.ModelArgs(d_model=16, n_layer=2, vocab_size=WORDS))


def _mamba(find):
    m = find.package("mamba.py", "mambapy.mamba")
    return m.Mamba(m.MambaConfig(d_model=16, n_layers=2))


def _rwkv(kind):
    def build(find):
        m = find("RWKV-LM/RWKV-v1/src/model.py", logger=logging.getLogger("RWKV"))
        config = m.GPTConfig(WORDS, LENGTH, model_type=kind, n_layer=2, n_head=2, n_embd=32, n_attn=32, n_ffn=48,
                             rwkv_emb_scale=0.4, rwkv_tiny_attn=0, rwkv_tiny_head=0)  # fmt: skip
        return m.GPT(config)

    return Row("RWKV-LM", f"v1, {kind}", build, words("idx", "targets"))


def _columns(name):
    """A text in each column."""
    return lambda size, g: {name: words(name)(size, g)[name].T.contiguous()}


def _lstm_batch(size, g):
    made = _columns("input")(size, g)["input"]
    return {"input": made, "hidden": (torch.zeros(2, made.shape[1], 32), torch.zeros(2, made.shape[1], 32))}


FILES = [
    Row("nanoGPT", "GPT", _nano, words("idx", "targets")),
    Row("minGPT", "GPT", _mini, words("idx", "targets")),
    _makemore("Transformer"), _makemore("BoW"), _makemore("RNN", "rnn"), _makemore("RNN", "gru"), _makemore("MLP"),
    _makemore("Bigram"),
    _cifar("ResNet18"), _cifar("PreActResNet18"), _cifar("MobileNetV2"), _cifar("ShuffleNetV2", 1),
    _cifar("EfficientNetB0"), _cifar("SENet18"), _cifar("densenet_cifar", note=DENSENET), _cifar("LeNet"),
    _cifar("VGG", "VGG11"),
    _example("mnist", "mnist/main.py", lambda m: m.Net(), images("x", 1, 28, 28)),
    _example("mnist_rnn", "mnist_rnn/main.py", lambda m: m.Net(), images("input", 28, 28)),
    _example("vae", "vae/main.py", lambda m: m.VAE(), images("x", 1, 28, 28)),
    _example("dcgan, generator", "dcgan/main.py", lambda m: m.Generator(0), images("input", 8, 1, 1), nz=8, ngf=8,
             ndf=8, nc=3),
    _example("dcgan, discriminator", "dcgan/main.py", lambda m: m.Discriminator(0), images("input", 3, 64, 64), nz=8,
             ngf=8, ndf=8, nc=3),
    _example("super_resolution", "super_resolution/model.py", lambda m: m.Net(3), images("x", 1, 16, 16)),
    # Of 32 x 32, one operand of a ReLU is nearer to 0 than its rounding.
    _example("fast_neural_style", "fast_neural_style/neural_style/transformer_net.py", lambda m: m.TransformerNet(),
             images("X", 3, 24, 24)),
    _example("word_language_model, LSTM", "word_language_model/model.py",
             lambda m: m.RNNModel("LSTM", WORDS, 32, 32, 2, 0.0), _lstm_batch),
    _example("word_language_model, Transformer", "word_language_model/model.py",
             lambda m: m.TransformerModel(WORDS, 32, 2, 48, 2, 0.1), _columns("src"),
             note="the first two of ten calls come before the graph; one fills the attribute src_mask"),
    _example("time_sequence_prediction", "time_sequence_prediction/train.py", lambda m: m.Sequence().double(),
             lambda size, g: {"input": torch.randn(3 + size, 12, generator=g, dtype=torch.float64)}, double=True),
    _example("actor_critic", "reinforcement_learning/actor_critic.py", lambda m: m.Policy(), images("x", 4)),
    _example("gcn", "gcn/main.py", lambda m: m.GCN(12, 16, 5), graph("input_tensor", "adj_mat")),
    _example("gat", "gat/main.py", lambda m: m.GAT(12, 16, 4, 5), graph("input_tensor", "adj_mat")),
    Row("pygcn", "GCN", lambda find: find.package("pygcn", "pygcn.models").GCN(12, 16, 5, 0.1),
        graph("x", "adj", sparse=True)),
    Row("pyGAT", "GAT", lambda find: find("pyGAT/models.py").GAT(12, 8, 5, 0.1, 0.2, 2), graph("x", "adj")),
    Row("DLRM", "DLRM_Net", _dlrm, _clicks),
    Row("mamba-minimal", "Mamba", _mamba_minimal, words("input_ids")),
    Row("mamba.py", "Mamba", _mamba, lambda size, g: {"x": torch.randn(2, 16, 16, generator=g)}),
    _rwkv("RWKV"), _rwkv("MHA_rotary"), _rwkv("MHA_pro"),
]  # fmt: skip

ROWS = {f"{row.program}: {row.model}": row for row in (*VITS, *TRANSFORMERS, *DIFFUSION, *FILES)}
