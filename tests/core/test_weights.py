"""Weights are counted by parameter, once, and those of embeddings are not."""

from torch import nn

from ortmodule.core.objects.weights import weights


def test_counts():
    layer = nn.Linear(3, 4)
    assert weights([layer]) == {id(layer.weight): 12, id(layer.bias): 4}


def test_shared_parameters_count_once():
    first, second = nn.Linear(3, 4, bias=False), nn.Linear(3, 4)
    second.weight = first.weight
    assert sum(weights([first, second]).values()) == 16


def test_embeddings_and_children_do_not_count():
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4, bias=False))
    assert weights([model, model[0], nn.EmbeddingBag(5, 2)]) == {}
    assert sum(weights(model.modules()).values()) == 12
