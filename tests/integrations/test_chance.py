"""NEFTune's noise and LayerDrop: what PyTorch runs of a training, and that it is eager mode's."""

import pytest
import torch
import transformers

from ortmodule import ORTModule, explain
from tests.integrations.test_trainer import Text, assert_alike, language_model, pair
from tests.selection import each

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
STEPS = 6


def test_neftune(tmp_path):
    """PyTorch runs the embedding with the hook that adds noise, and the engine all of the rest."""
    ours, theirs = pair(language_model, tmp_path, Text, neftune_noise_alpha=5.0)
    assert_alike(ours, theirs)
    report = explain(ours.model)
    assert report.python_ops == ["transformer.wte"] and report.pytorch_calls == report.unreached_steps == 0, report
    assert report.engine_calls >= 8 and report.weights_in_engine == 1.0


def wav2vec(layerdrop):
    config = transformers.Wav2Vec2Config(
        vocab_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=layerdrop, mask_time_prob=0.0,
    )  # fmt: skip
    given = {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 8, (2, 4))}
    return transformers.Wav2Vec2ForCTC(config), given


def opt(layerdrop):
    config = transformers.OPTConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=16,
        max_position_embeddings=16, layerdrop=layerdrop, dropout=0.0, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(3, 32, (2, 8))
    return transformers.OPTForCausalLM(config), {"input_ids": ids, "labels": ids}


@each(
    ("make", "layerdrop", "left"),
    [
        (wav2vec, 0.5, ["wav2vec2.encoder"]),
        (wav2vec, 0.0, []),
        (opt, 0.5, ["model.decoder"]),
        (opt, 0.0, []),
    ],
    [(opt, 0.5, ["model.decoder"])],
)
def test_layerdrop(make, layerdrop, left):
    """The same layers are left out as in eager mode, and PyTorch runs what chance decides in, of short layers."""
    found = []
    for wrap in (ORTModule, lambda model: model):
        torch.manual_seed(0)
        model, given = make(layerdrop)
        model, losses = wrap(model.train()), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(model(**given).loss)
            losses[-1].backward()
            optimizer.step()
        found.append((model, torch.stack(losses).detach(), torch.rand(1)))
    (ours, *values), (_, *expected) = found
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    report = explain(ours)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (STEPS, 0, 0)
    assert report.python_ops == left
