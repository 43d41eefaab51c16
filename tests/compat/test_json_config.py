"""A wrapped module gets the settings of a JSON file, and keeps those that its Config has given."""

import json

import pytest
from torch import nn

from ortmodule import Config, ORTModule
from ortmodule.compat.json_config import VARIABLE, load_from_json
from ortmodule.core.errors import CompatError
from ortmodule.core.objects.dispatchers import dispatcher_of


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"OnnxOpsetVersion": 19}))
    return str(path)


def test_from_a_path(file):
    model = ORTModule(nn.Linear(2, 2), config=Config(memory_opt_level=1))
    before = dispatcher_of(model)
    load_from_json(model, file)
    owner = dispatcher_of(model)
    assert owner is not before and owner.module is before.module
    assert owner.config.onnx_opset_version == 19 and owner.config.memory_opt_level == 1


def test_from_the_environment(file, monkeypatch):
    model = ORTModule(nn.Linear(2, 2))
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(CompatError, match=f"wants a path, or one in {VARIABLE}"):
        load_from_json(model)
    monkeypatch.setenv(VARIABLE, file)
    load_from_json(model)
    assert dispatcher_of(model).config.onnx_opset_version == 19


def test_another_module(file):
    with pytest.raises(TypeError, match="wants an ORTModule, not Linear"):
        load_from_json(nn.Linear(2, 2), file)
