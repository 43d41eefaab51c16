"""Lists everything that `python -m tests.models` tries: families of transformers, parts of torch.nn, classics."""

import functools
import itertools

import torch

from tests.models import classics, inputs, layers, tiny
from tests.models.trial import Subject


def names():
    """All names, sorted within their groups."""
    return [*tiny.families(), *(f"nn.{name}" for name in sorted(layers.LAYERS)), *sorted(classics.CLASSICS)]


def subject(name):
    """The subject of this name. Raises what building it raises."""
    if name.startswith("nn."):
        return layers.LAYERS[name.removeprefix("nn.")]
    if name in classics.CLASSICS:
        return classics.CLASSICS[name]
    return _family(name)


def _family(name):
    """The first of a family's model types that can be built and run, in the first way that serves.

    Images and sounds are left out only where none are accepted in any way.
    """
    cause = None
    kinds = tiny.families()[name][:4]
    for kind, text, way in itertools.product(kinds, (False, True), tiny.WAYS):
        try:
            head, cls = tiny.model_class(kind)
            if cls is None:
                raise LookupError("no class of models has this configuration")
            config = tiny.tiny_config(kind, way)
            _check_size(cls, config)
            build = functools.partial(_build, cls, config)
            model = build()
            recipe = inputs.find(model, head, lambda batch, model=model: _step(model, batch), text)
        except Exception as error:
            cause = cause or error
            continue
        return Subject(build, functools.partial(_batch, recipe, head), "transformers")
    raise cause


MOST_PARAMETERS = 30_000_000


def _check_size(cls, config):
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"its smallest configuration has {count / 1e6:.0f} million parameters")


def _build(cls, config):
    torch.manual_seed(0)
    model = tiny.without_randomness(cls(config)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            # What begins as zeros would hide whatever comes before it, and make every expert equally good.
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(0, 0.05)
    return model


def _batch(recipe, head, model, size, generator):
    return recipe.batch(model, head, size, generator)


def _step(model, batch):
    from tests.models.trial import step

    step(model, batch)
