"""A checkpoint is one file, whole or not there, and another file is refused with a sentence."""

import pytest
import torch

from ortmodule.trainer import checkpoint


def test_there_and_back(tmp_path):
    path, weight = tmp_path / "a.pt", torch.arange(3.0)
    checkpoint.write(path, {"model": {"weight": weight}, "step": 3})
    checkpoint.write(path, {"model": {"weight": weight}, "step": 4})  # in its place
    state = checkpoint.read(str(path))
    assert state["step"] == 4 and torch.equal(state["model"]["weight"], weight)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_what_a_killed_process_left_goes(tmp_path):
    left, others = tmp_path / ".a.pt.12345678.part", tmp_path / ".b.pt.12345678.part"
    left.write_bytes(b"cut"), others.write_bytes(b"cut")
    checkpoint.write(tmp_path / "a.pt", {})
    assert not left.exists() and others.exists()


def test_cut_short(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.write(path, {"model": torch.zeros(1000)})
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is no checkpoint, or it is cut short"):
            checkpoint.read(path)


def test_another_file(tmp_path):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="is no checkpoint of an ORTTrainer"):
        checkpoint.read(tmp_path / "model.pt")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        checkpoint.read(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        checkpoint.write(tmp_path / "none" / "a.pt", {})


class Thing:
    pass


def test_what_scripts_add():
    checkpoint.check_user({"epoch": 3, "best": torch.zeros(2), "names": ["a"]})
    with pytest.raises(TypeError, match="user_dict\\['model'\\] is a Thing"):
        checkpoint.check_user({"epoch": 3, "model": Thing()})


@pytest.mark.parametrize(
    "saved, message",
    [
        ({"a": torch.zeros(2)}, "has no b, which the model has"),
        ({"a": torch.zeros(2), "b": torch.zeros(1), "c": 3}, "has c, which the model has not"),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, "has a of shape \\[3\\], the model of \\[2\\]"),
    ],
)
def test_weights_of_another_model(saved, message):
    own = {"a": torch.zeros(2), "b": torch.zeros(1)}
    checkpoint.check_weights("x.pt", own, own)
    with pytest.raises(ValueError, match=message):
        checkpoint.check_weights("x.pt", saved, own)
