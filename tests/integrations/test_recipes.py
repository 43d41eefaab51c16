"""The recipes of `examples/` run for some steps, in the engine, and their losses are PyTorch's."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from ortmodule import compat
from tests.integrations.small import WORK
from tests.selection import each

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
STEPS, ROOT = 4, Path(__file__).resolve().parents[2]
#: Without --full, too. The first is compared with eager mode then.
SHORT = (
    "accelerate_loop", "image_classification", "lightning_module", "masked_lm", "token_classification",
    "transformer_translation",
)  # fmt: skip
#: By recipe, the packages that it needs beside transformers.
NEEDED = {
    "accelerate_loop": [],
    "dpo": ["trl", "datasets"],
    "image_classification": ["sklearn"],
    "lightning_module": ["lightning"],
    "lora": ["peft"],
    "masked_lm": [],
    "question_answering": ["babel"],
    "sentence_embeddings": ["sentence_transformers", "datasets"],
    "sft": ["trl", "datasets"],
    "summarization": [],
    "token_classification": [],
    "transformer_translation": ["babel"],
    "translation": ["babel"],
}


def run(name, folder, backend):
    for package in NEEDED[name]:
        pytest.importorskip(package)
    recipe = importlib.import_module(f"examples.recipes.{name}")
    line = ["--backend", backend, "--steps", str(STEPS), "--batch_size", "4", "--out", str(folder)]
    return recipe.main(line)


@each("name", NEEDED, SHORT)
def test_recipe(name, tmp_path, capsys, request):
    """(Masks of dropout are the engine's own, so losses are near, and not the same.)"""
    ours = run(name, tmp_path, "ortmodule")
    assert ours["engine_calls"] >= STEPS and ours["pytorch_calls"] == 0, ours
    assert ours["weights_in_engine"] >= WORK, ours
    assert f"{name}, ortmodule: first_loss" in capsys.readouterr().out
    if not request.config.getoption("--full") and name != SHORT[0]:
        return
    theirs = run(name, tmp_path, "eager")
    assert (tmp_path / f"{name}.eager.json").exists()
    for key in theirs.keys() & {"first_loss", "last_loss", "eval_loss"}:
        assert ours[key] == pytest.approx(theirs[key], rel=0.05), key


@pytest.mark.full
@pytest.mark.parametrize("name", ["lightning_module", "masked_lm"])
def test_a_recipe_compiled(name, tmp_path):
    """The third column of the table. (A Trainer drops columns that forward's signature has not.)"""
    ours = run(name, tmp_path, "compile")
    theirs = run(name, tmp_path, "eager")
    for key in theirs.keys() & {"first_loss", "last_loss", "eval_loss"}:
        assert ours[key] == pytest.approx(theirs[key], rel=0.05), key


@pytest.mark.full
def test_a_script_for_onnx_runtimes_ortmodule(tmp_path):
    """With the import names switched on for a folder that stands for site-packages."""
    pytest.importorskip("sklearn")
    compat.enable(tmp_path)
    start = f"import site, sys, runpy\nsite.addsitedir({str(tmp_path)!r})\nsys.argv = ['script', '--steps', '100']\n"
    start += "runpy.run_module('examples.recipes.original_script', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.rpartition("accuracy")[2]) > 0.6
