"""Makes a batch for any model of transformers, from the signature of its forward and its configuration.

What a parameter takes is known by its name, as far as names are conventions (`input_ids`, `pixel_values`, `labels`).
Where they are not (how many tokens an image takes the place of, whether images come as patches), there are several
recipes: the first that PyTorch accepts is taken, and so is what an error says of the right number.
"""

import inspect
import re
from dataclasses import dataclass, replace

import torch

from tests.models.tiny import CLASSES, VOCABULARY

#: Where a setting may be: in the configuration itself, or in one that is nested in it.
PARTS = ("", "vision_config", "text_config", "audio_config", "encoder_config", "speech_config", "encoder", "decoder")
PARTS += ("backbone_config", "decoder_config")
SHAPES = ((2, 24), (3, 32))  # rows and length of the batches that are compared


#: Heads whose labels are the tokens themselves.
OF_TOKENS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "PRETRAINING", "MULTIMODAL_LM")


@dataclass(frozen=True)
class Recipe:
    """One way to make a batch."""

    labels: bool = True
    image: str = "pixels"  # how images come: as pixels, as a row of patches with their grid, as frames; or not at all
    audio: bool = True
    tokens: int = 0  # an image, or a sound, takes the place of so many tokens
    side: int = 32
    decoder: bool = True
    mask: bool = True

    def batch(self, model, head, size, generator):
        """The arguments of forward, by name."""
        return _Batch(self, model, head, size, generator).arguments()


class _Batch:
    def __init__(self, recipe, model, head, size, generator):
        self.recipe, self.model, self.head, self.generator = recipe, model, head, generator
        self.config = model.config
        self.rows, self.length = SHAPES[size]
        self.parameters = inspect.signature(model.forward).parameters

    # --- sizes --------------------------------------------------------------------------------------------------------

    def setting(self, *names, default=None, kinds=PARTS):
        """The first of these settings that the configuration has, or one that is nested in it."""
        for kind in kinds:
            config = getattr(self.config, kind, None) if kind else self.config
            for name in names:
                value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
                if value is not None and not isinstance(value, bool):
                    return value
        return default

    def vocabulary(self):
        value = self.setting("vocab_size", default=VOCABULARY)
        return min(value, VOCABULARY) if isinstance(value, int) and value > 8 else VOCABULARY

    def side(self):
        # The coarsest of several levels is to have more than one place: a norm over one number is nothing but rounding.
        levels = self.setting("num_feature_levels", default=1)
        side = self.setting("image_size", default=self.recipe.side if levels < 2 else 4 * self.recipe.side)
        return side if isinstance(side, int) else side[0] if isinstance(side, (list, tuple)) else self.recipe.side

    def channels(self):
        found = self.setting("num_channels", "in_channels", "in_chans", default=3)
        return found if isinstance(found, int) and found in (1, 3, 4) else 3

    # --- parts --------------------------------------------------------------------------------------------------------

    def integers(self, high, *shape, low=0):
        return torch.randint(low, high, shape, generator=self.generator)

    def noise(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length=None):
        # Special tokens are at both ends of the vocabulary.
        ids = self.integers(max(8, self.vocabulary() - 40), self.rows, length or self.length, low=3)
        return ids

    def input_ids(self):
        ids = self.ids()
        names = (
            "image_token_id",
            "image_token_index",
            "audio_token_id",
            "audio_token_index",
            "media_placeholder_token_id",
        )
        token = self.setting(*names)
        if self.recipe.tokens and token is not None:
            ids = torch.cat([ids[:, :1], torch.full((self.rows, self.recipe.tokens), token), ids[:, 1:]], 1)
        return ids

    def pixel_values(self, kind=None):
        side, channels, kind = self.side(), self.channels(), kind or self.recipe.image
        if kind == "frames":
            frames = self.setting("num_frames", "frames_per_clip", default=4)
            return self.noise(self.rows, frames, channels, side, side)
        if kind == "patches":
            patch, deep = self.patch(), self.setting("temporal_patch_size", default=1)
            return self.noise(self.rows * self.patches(), channels * deep * patch * patch)
        if kind == "tiles":
            return self.noise(self.rows, 1, channels, side, side)
        return self.noise(self.rows, channels, side, side)

    def patch(self):
        patch = self.setting("patch_size", default=8)
        return patch if isinstance(patch, int) else patch[0]

    def patches(self):
        return (self.side() // self.patch()) ** 2

    def flattened_patches(self):
        """Each with its row and column in front."""
        places = self.integers(4, self.rows, self.length, 2).float()
        return torch.cat([places, self.noise(self.rows, self.length, 3 * self.patch() ** 2)], -1)

    def grid(self):
        side = self.side() // self.patch()
        return torch.tensor([[1, side, side]] * self.rows)

    def input_features(self):
        names = (
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "n_mels",
            "mel_bins",
        )
        bins = self.setting(*names, "num_mels", "input_size", default=16)
        frames = self.setting("max_source_positions")
        if self.recipe.image == "frames":
            return self.noise(self.rows, 4 * self.length, bins)
        return self.noise(self.rows, bins, 2 * frames if isinstance(frames, int) else 4 * self.length)

    def input_values(self):
        if self.recipe.image == "spectrum":
            return self.noise(
                self.rows, self.setting("max_length", default=64), self.setting("num_mel_bins", default=16)
            )
        wave = self.noise(self.rows, 200 * self.length)
        return wave[:, None] if self.recipe.image == "frames" else wave

    def bbox(self):
        corners = self.integers(31, self.rows, self.length, 2, low=1)
        return torch.cat([corners, corners + 16], -1)

    def labels(self, arguments):
        head, rows = self.head, self.rows
        if head in OF_TOKENS and "input_ids" in arguments and not self.config.is_encoder_decoder:
            return arguments["input_ids"].clamp(max=self.vocabulary() - 1)
        if head in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MASKED_LM"):
            return self.ids(self.length // 2)
        if head == "CTC":
            return self.integers(self.vocabulary() - 1, rows, 4, low=3)
        if head in ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"):
            return self.integers(self.classes(), rows)
        if head == "SEMANTIC_SEGMENTATION":
            return self.integers(self.classes(), rows, self.side(), self.side())
        if head == "TOKEN_CLASSIFICATION":
            return self.integers(self.classes(), rows, self.length)
        return None

    def classes(self):
        return min(CLASSES, self.config.num_labels)

    def arguments(self):
        """Those of the parameters that this file knows, as far as the recipe wants them."""
        made, recipe = {}, self.recipe
        main = getattr(self.model, "main_input_name", "input_ids")
        images = recipe.image != "none"
        makers = {
            "input_ids": self.input_ids,
            "bbox": self.bbox,
            "inputs": lambda: self.ids(),
            "flattened_patches": self.flattened_patches,
            "prompt_pixel_values": self.pixel_values,
            "prompt_masks": self.pixel_values,
            "qformer_input_ids": self.ids,
            "task_inputs": self.ids,
            "freq": lambda: self.integers(3, self.rows, 1),
            "audio_mel": self.input_features,
        }
        if images:
            makers |= {"pixel_values": self.pixel_values}
            if "pixel_values" not in self.parameters or main == "pixel_values_videos":
                makers |= {"pixel_values_videos": lambda: self.pixel_values("frames")}
            if recipe.image == "patches":
                makers |= dict.fromkeys(("image_grid_thw", "grid_thw"), self.grid)
                makers |= dict.fromkeys(("image_grid_hws", "spatial_shapes"), lambda: self.grid()[:, 1:])
                makers |= {"pixel_attention_mask": lambda: torch.ones(self.rows, self.patches(), dtype=torch.int64)}
            if recipe.image == "tiles":
                makers |= {"image_sizes": lambda: torch.tensor([[self.side(), self.side()]] * self.rows)}
        if recipe.audio:
            makers |= {"input_features": self.input_features, "input_values": self.input_values}
        makers |= self.series()
        for name, maker in makers.items():
            if name in self.parameters or name == main:
                made[name] = maker()
        if recipe.mask and "attention_mask" in self.parameters and "input_ids" in made:
            ids = made["input_ids"]
            ends = self.integers(ids.shape[1] + 1, self.rows, 1, low=ids.shape[1] // 2 + recipe.tokens // 2)
            mask = (torch.arange(ids.shape[1]) < ends) | (torch.arange(ids.shape[1]) <= recipe.tokens)
            made["attention_mask"] = mask.long()
        if "mm_token_type_ids" in self.parameters and recipe.tokens:
            made["mm_token_type_ids"] = torch.zeros_like(made["input_ids"])
            made["mm_token_type_ids"][:, 1 : 1 + recipe.tokens] = 1
        masked = self.parameters.get("bool_masked_pos")
        if masked is not None and masked.default is inspect.Parameter.empty:
            count = self.patches() * (self.setting("num_frames", default=1) // self.setting("tubelet_size", default=1))
            made["bool_masked_pos"] = (torch.arange(count) % 2 == 0).repeat(self.rows, 1)
        if "return_loss" in self.parameters and recipe.labels:
            made["return_loss"] = True
        elif "labels" in self.parameters and recipe.labels and (labels := self.labels(made)) is not None:
            made["labels"] = labels
        given = "labels" in made and self.config.is_encoder_decoder
        if "decoder_input_ids" in self.parameters and recipe.decoder and not given:
            made["decoder_input_ids"] = self.ids(self.length // 2)
        return made

    def series(self):
        """Arguments of models for time series."""
        past = self.setting("context_length", default=self.length)
        lags = self.setting("lags_sequence", default=[0])
        ahead = self.setting("prediction_length", default=4)
        whole = past + (max(lags) if isinstance(lags, (list, tuple)) and lags else 0)
        whole = whole if "past_time_features" in self.parameters else past
        wide = self.setting("num_input_channels", "input_size", default=1)
        shape = (whole,) if wide == 1 and "past_time_features" in self.parameters else (whole, wide)
        features = max(1, self.setting("num_time_features", default=1))
        return {
            "past_values": lambda: self.noise(self.rows, *shape),
            "past_time_features": lambda: self.noise(self.rows, whole, features),
            "past_observed_mask": lambda: torch.ones(self.rows, *shape),
            "past_values_padding": lambda: torch.zeros(self.rows, whole),
            **({"future_values": lambda: self.noise(self.rows, ahead, *shape[1:])} if self.recipe.labels else {}),
            "future_time_features": lambda: self.noise(self.rows, ahead, features),
        }


_TOLD = re.compile(r"features[^\d]*tokens[^\d]*(?:tokens)?[^\d]*(\d+),?[^\d]*features[^\d]*(\d+)", re.I | re.S)


def _tokens(model, features):
    """How many tokens a row needs: features are counted as vectors, or as numbers."""
    table = model.get_input_embeddings()
    width = table.weight.shape[1] if isinstance(table, torch.nn.Embedding) else 1
    return dict.fromkeys(max(1, features // SHAPES[0][0] // n) for n in (width, 1) if features % n == 0)


def find(model, head, forward, text=False):
    """The first recipe whose batches ``forward(arguments)`` accepts. Raises what it raises for the last of them.

    ``text``: a model that reads text, too, gets nothing to see or to hear.
    """
    parameters = inspect.signature(model.forward).parameters
    pixels = [name for name in parameters if name.startswith("pixel_values") or name == "image_grid_thw"]
    both = "input_ids" in parameters
    images = ["pixels", "frames", "patches", "tiles"] if pixels else ["pixels", "frames", "spectrum"]
    if {"image_grid_thw", "grid_thw", "image_grid_hws", "spatial_shapes"} & parameters.keys():
        images = ["patches", "pixels"]
    sees = both and (pixels or {"input_features", "input_values"} & parameters.keys())
    if text and not sees:
        raise LookupError("it reads nothing but text, or none")
    if text:
        images = ["none"]
    cause = None
    for image in images:
        for labels in (True, False):
            waiting, told = [Recipe(labels=labels, image=image, audio=image != "none")], None
            while waiting:
                recipe = waiting.pop(0)
                try:
                    forward(recipe.batch(model, head, 0, torch.Generator().manual_seed(0)))
                    return recipe
                except Exception as error:
                    cause = cause or error
                    if told is None and image != "none" and (told := _TOLD.search(str(error))) is not None:
                        waiting = [replace(recipe, tokens=n) for n in _tokens(model, int(told[2]))]
    raise cause
