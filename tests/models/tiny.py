"""Builds any architecture of transformers small: its own configuration with every size that is known shrunk.

A rule is a pattern for the names of fields and what becomes of a number or a list in such a field. Rules know the
conventions of configurations, never a model. What they cannot know is how sizes have to fit each other in a way of one
model's own: there are several ways to shrink (`WAYS`), the later ones changing less, since defaults fit each other.
"""

import contextlib
import re
from dataclasses import dataclass

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

VOCABULARY, CLASSES = 99, 5
WIDTH, HEADS, HEAD = 32, 4, 8

#: What a family is tried as: the first of these that it has.
HEADS_OF_MODELS = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CTC",
    "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "DEPTH_ESTIMATION", "ZERO_SHOT_OBJECT_DETECTION",
    "TIME_SERIES_PREDICTION", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "PRETRAINING", "TEXT_TO_SPECTROGRAM",
    "VISUAL_QUESTION_ANSWERING", "MULTIMODAL_LM", "TEXT_RECOGNITION", "TABLE_RECOGNITION", "KEYPOINT_DETECTION",
    "IMAGE_TO_IMAGE", "IMAGE_MATTING", "POSE_ESTIMATION", "",
)  # fmt: skip


def _growing(old):
    """Widths of stages: growing by two as the usual ones do, or all alike."""
    return [8 * 2 ** min(i, 3) if old[-1] != old[0] else WIDTH for i in range(len(old))]


def _at_most(most):
    def shrunk(old):
        return [shrunk(n) for n in old] if isinstance(old, list) else min(old, most) if isinstance(old, int) else old

    return shrunk


def _heads(old):
    """As many as fit into the widths of :func:`_growing`."""
    return [min(HEADS, 2**i) for i in range(len(old))] if old[0] != old[-1] else _at_most(HEADS)(old)


def _ones(old):
    return [1] * len(old)


def _to(small):
    """Numbers larger than this become it."""
    return lambda n: min(n, small)


#: (names of fields as patterns, what a number becomes, what a list becomes); None: it stays. The first match counts.
#: These say how often something is there: rarely has anything to fit them.
COUNTS = [
    ("num_feat_extract_layers sampling_rate sample_rate num_attention_heads_per_stage .*layer_scale.*", None, None),
    (r"(\w+_)?vocab_size n_tokens vision_vocabulary_size image_vocabulary_size", _to(VOCABULARY), None),
    (r"num_experts_per_tok(en)? experts_per_token top_?k moe_k num_selected_experts \w*top_k(_experts)?", _to(2), None),
    (r"(num_|n_|moe_)*(local_|routed_|total_)?experts", _to(4), _at_most(4)),
    ("prediction_length", _to(4), None),
    ("num_time_features", lambda n: 1, None),  # with none a batch would hold an empty tensor
    ("attn_layer_period", _to(2), None),
    ("attn_layer_offset", _to(1), None),
    (r"n_group topk_group \w*n_shared_experts first_k_dense_replace", _to(1), None),
    (r"depths \w*layers_per_stage (num_)?blocks(_per_stage)? layers \w*_blocks", _to(2), _ones),
    (r"(\w*_)?(num_)?(\w+_)?layers? n_layers? depth \w*_depth", _to(2), _ones),
]  # fmt: skip
#: How wide things are.
SIZES = [
    (r"(\w*_)?max_(\w+_)?position\w* max_(source|target|text|seq)\w* n_positions n_ctx context_length", _to(64), None),
    (r"position_embeddings seq_length max_length max_sequence_length block_size", _to(64), None),
    (r"\w*key_value_heads num_kv_heads n_head_kv num_key_value_groups_heads", _to(HEADS), _at_most(HEADS)),
    (r"\w*attention_heads num_heads n_heads? heads num_\w*_heads \w*_num_heads \w*_nheads index_n_heads mamba_n_heads",
     _to(HEADS), _heads),
    (r"d_kv (\w+_)?head_dim(ension)? head_size dim_head attention_head_size attention_head_dim d_head mamba_d_head",
     _to(HEAD), None),
    (r"mamba_headdim", _to(16), None),
    (r"rotary_dim", _to(4), None),
    (r"\w*_rank time_mix_extra_dim", _to(16), None),
    (r"\w*state_(size|dim) \w*d_state", _to(8), None),
    (r"chunk_size mamba_chunk_size \w*_chunk_size(?<!feed_forward)", lambda n: min(n, 4) if n else n, None),
    (r"\w*image_size input_resolution img_size", lambda n: 32, lambda old: [32] * len(old)),
    (r"\w*patch_size", _to(8), _at_most(8)),
    (r"window_size sliding_window attention_window local_attention window_size_per_stage", _to(4), _at_most(4)),
    (r"num_mel_bins feature_size num_mels n_mels input_feat_per_channel mel_bins", _to(16), None),
    (r"num_frames frames_per_clip tubelet\w*", _to(4), None),
    (r"conv_dim \w*conv_channels \w*_channel_list backbone_feature_sizes embed_dim_per_stage hidden_channels",
     _to(16), _at_most(16)),
    (r"neck_hidden_sizes hidden_sizes \w*embed_dims widths encoder_hidden_sizes decoder_hidden_sizes encoder_channels",
     _to(WIDTH), _growing),
    (r"(\w+_)?(hidden|embedding|embed|proj|projection|model|attention|latent)_(size|dim) (\w+_)?d_model n_embd emb_dim",
     _to(WIDTH), _growing),
    (r"projector_hidden_size width output_dim word_embed_proj_dim input_dim codebook_dim d_latents cross_attention_dim",
     _to(WIDTH), _growing),
    (r"(\w+_)?(intermediate|ffn|ffn_hidden|mlp_hidden|feed_forward|mlp)_(size|dim) (\w+_)?(d_ff|d_inner|n_inner)",
     lambda n: 2 * WIDTH, lambda old: [2 * WIDTH] * len(old)),
    (r"dim_feedforward feedforward_dim ff_dim inner_dim", lambda n: 2 * WIDTH, None),
    (r"num_queries num_query_tokens num_latents num_detection_tokens num_image_tokens", _to(8), None),
    (r"codebook_size num_embeddings num_codevectors_per_group num_discrete\w*", _to(32), None),
    (r"num_conv_pos_embeddings", _to(8), None),
    (r"num_conv_pos_embedding_groups \w*num_groups groups", _to(4), None),
    (r"tdnn_dim", None, _at_most(16)),
    (r"\w*_dim dim \w*channels num_filters filters \w*_width \w*_size_per_layer_input \w*_features reduction",
     lambda n: 16 if n > 64 else n, lambda old: [min(16, n) if isinstance(n, int) else n for n in old]),
]  # fmt: skip
#: Widths, which are made smaller together, so that what fits each other goes on to.
_WIDTHS = r"\w*(size|dim|dims|dimension|channels|widths?|features|_list) d_\w+ \w+_d_\w+ n_embd n_inner head_size"
_WIDTHS += r" \w*_headdim \w*filters hidden_sizes"
#: Fields of these names are none.
_NO_WIDTHS = r"\w*(image|patch|kernel|window|chunk|context|crop|batch|grid|pool|bucket|step|group|cache)\w*size"


def _together(factor):
    def smaller(old):
        if isinstance(old, list):
            return [smaller(n) for n in old]
        return old // factor if isinstance(old, int) and old >= 8 * factor and old % factor == 0 else old

    return [(_NO_WIDTHS, None, None), (_WIDTHS, smaller, smaller)]


@dataclass(frozen=True)
class Way:
    """One way to shrink a configuration."""

    rules: list
    fills: bool = False  # fields that are None get what a large number would become
    sections: int = 0  # of a rotary embedding: divided by so much, or made to fill half of HEAD
    layers: bool = True  # there are fewer of them, too


def _compiled(*tables):
    rules = [rule for table in tables for rule in table]
    return [(re.compile("|".join(names.split())), number, several) for names, number, several in rules]


WAYS = (
    Way(_compiled(COUNTS, SIZES)),
    Way(_compiled(COUNTS, SIZES), fills=True),
    Way(_compiled(COUNTS, _together(8)), sections=8),
    Way(_compiled(COUNTS, _together(4)), sections=4),
    Way(_compiled(COUNTS), sections=1),
    Way(_compiled(COUNTS[:2], _together(8)), sections=8, layers=False),
)
#: Lists with an entry for every layer.
_PER_LAYER = re.compile(r"\w*_types|layers_block_type|layer_rope_theta|no_rope_layers")
_COUNT = re.compile(r"num_hidden_layers|num_layers|n_layers?|decoder_layers")
_TOKEN = re.compile(r"(\w*_)?token_(id|index)|(\w+_)?(start|end)_token_(id|index)")

#: Models of timm that are made for tests.
_TIMM = {"timm_backbone": "backbone", "timm_wrapper": "architecture"}
_OPEN = 1 << 20  # what a field that is None is taken for, where it is filled
#: What lists become that are None, in all ways but the first.
_KINDS = {
    "layer_types": ["full_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "attn_layer_indices": [0],
}


def families():
    """{name of a family: its model types, the one of the same name first}: one family for each part of transformers."""
    found = {}
    for kind in CONFIG_MAPPING_NAMES:
        found.setdefault(model_type_to_module_name(kind), []).append(kind)
    return {name: sorted(kinds, key=lambda k: k.replace("-", "_") != name) for name, kinds in sorted(found.items())}


def model_class(kind):
    """(head, class) of a model type, by the first of HEADS_OF_MODELS that it has, or (None, None)."""
    for head in HEADS_OF_MODELS:
        name = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES").get(kind)
        for each in name if isinstance(name, tuple) else (name,):
            if each is not None:
                return head, getattr(transformers, each)
    return None, None


def tiny_config(kind, way=WAYS[0]):
    """The configuration of a model type with every size that is known shrunk."""
    return shrunk(type(AutoConfig.for_model(kind))(), way)


def shrunk(config, way=WAYS[0]):
    """A configuration of the same class, small."""
    settings = {}
    layers = 2
    old = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    for name, value in old.items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = shrunk(value, way)
        elif isinstance(value, (list, tuple)) and _PER_LAYER.fullmatch(name) and value:
            layers = max(layers, len(set(value))) if all(isinstance(v, (str, int)) for v in value) else layers
    for name, value in old.items():
        if name not in settings and (new := _shrunk_field(name, value, layers, way)) is not None and new != value:
            settings[name] = new
    rates = [name for name in old if "drop" in name or name in ("mask_time_prob", "mask_feature_prob")]
    settings |= {name: 0.0 for name in rates if isinstance(old[name], float)}
    grouped = isinstance(old.get("num_key_value_heads"), int)
    if grouped and old["num_key_value_heads"] < old.get("num_attention_heads", 0) and not way.sections:
        settings["num_key_value_heads"] = min(old["num_key_value_heads"], HEADS // 2)
    nested = way is not WAYS[0] and any(isinstance(value, PreTrainedConfig) for value in old.values())
    vocabulary = settings.get("vocab_size", old.get("vocab_size", VOCABULARY if nested else None))
    if isinstance(vocabulary, int):
        settings |= _tokens(old, vocabulary)
    if (name := _TIMM.get(config.model_type)) is not None:
        settings[name] = "test_resnet"
    keep = {name: value for name, value in old.items() if name in _fields(config) and name not in settings}
    made = type(config)(**{**keep, **settings})
    for name, value in settings.items():  # what the constructor computes from defaults
        if name in old and isinstance(value, (int, float, list)) and not _TOKEN.fullmatch(name):
            with contextlib.suppress(Exception):
                if getattr(made, name, value) == old[name] != value:
                    setattr(made, name, value)
    return made


def _fields(config):
    """Fields that say what the model is, of types that no rule shrinks: strings, flags, fractions."""
    skip = {"transformers_version", "model_type", "dtype", "problem_type"}
    return {
        name for name, value in vars(config).items()
        if name not in skip and not name.startswith("_") and isinstance(value, (str, bool)) and value
    } & set(getattr(type(config), "__dataclass_fields__", {}))  # fmt: skip


def _shrunk_field(name, value, layers, way):
    if value is None and way is not WAYS[0] and not _TOKEN.fullmatch(name):
        value = _KINDS.get(name, _OPEN if way.fills else None)
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple, dict)):
        return None
    if isinstance(value, dict):
        if way.fills and "rope_theta" in value:
            value = {"mrope_section": [HEAD // 4] * 3, **value}
        return _rope(value, way.sections) if "rope" in name else None
    several = isinstance(value, (list, tuple))
    if several and name.endswith("_per_layer") and way.layers:
        one = name.removesuffix("_per_layer")
        return [_shrunk_field(one, each, layers, way) or each for each in value[:layers]]
    if (_PER_LAYER if several else _COUNT).fullmatch(name) and not way.layers:
        return None
    if several and _PER_LAYER.fullmatch(name) and value:
        if isinstance(value[0], (list, tuple)):  # a list of kinds, and how often it comes
            return [[*part[:-1], 1] if isinstance(part[-1], int) else part for part in value[:1]]
        kinds = list(dict.fromkeys(value))
        return (kinds * layers)[:layers] if len(kinds) < layers else kinds[:layers]
    if not several and _COUNT.fullmatch(name):
        return layers if value > layers else value
    if several and not (value and all(isinstance(v, int) for v in value)):
        return None
    for pattern, number, listed in way.rules:
        if pattern.fullmatch(name):
            change = listed if several else number
            return None if change is None else change(list(value) if several else value)
    return None


def _rope(parameters, divided):
    """Sections of a rotary embedding have to fill half a head."""
    new = dict(parameters)
    for name, value in parameters.items():
        if isinstance(value, dict):
            new[name] = _rope(value, divided)
        elif name.endswith("section") and isinstance(value, (list, tuple)) and divided:
            new[name] = [n // divided for n in value]
        elif name.endswith("section") and isinstance(value, (list, tuple)):
            new[name] = [HEAD // 2 - 2 * (len(value) > 2) - (len(value) == 2), *[1] * (len(value) - 1)]
        elif name == "original_max_position_embeddings" and not divided:
            new[name] = 32
    return new


def _tokens(old, vocabulary):
    """Special tokens that the small vocabulary has, each another one, counted from its end."""
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    found, last = {}, vocabulary
    for name, value in old.items():
        if isinstance(value, list) and name == "eos_token_id":
            found[name] = 2
        seen = any(kind in name for kind in ("image", "video", "audio"))
        taken = isinstance(value, int) and not isinstance(value, bool) or seen and value is None
        if not _TOKEN.fullmatch(name) or not taken:
            continue
        if name in usual:
            found[name] = usual[name]
        elif seen or value >= vocabulary:
            last -= 1
            found[name] = last
    return found


def without_randomness(model):
    """Sets every rate of dropout to zero, wherever it is kept."""
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or name == "p" and "Drop" in type(part).__name__):
                setattr(part, name, 0.0)
    return model
