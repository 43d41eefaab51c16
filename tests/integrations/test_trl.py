"""TRL's trainers with a wrapped model: losses, checkpoints and resumed trainings are those of the plain model."""

import pytest
import transformers

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from ortmodule import ORTModule, explain  # noqa: E402
from tests.integrations.small import (  # noqa: E402
    LENGTH,
    assert_in_engine,
    assert_same_weights,
    llama,
    losses,
    sentences,
    tokenizer,
)

STEPS, BATCH = 6, 4


def begin(text):
    return text[:24].rpartition(" ")[0]


def variety(completions, **_):
    """A reward: how many different characters there are."""
    return [float(len(set(each))) for each in completions]


CACHED = "GRPO, with a cache"
#: TRL's function for probabilities, with the head in it, is PyTorch's: as in a model of some billion weights, the head
#: has a small share of them.
DEEP = {"hidden_size": 48, "intermediate_size": 256, "num_hidden_layers": 5}
#: With TRL's default, which the other kinds are faster without. DPO switches it off and on in each step.
CHECKPOINTED = ("completions", "DPO", "GRPO")

#: By kind of training: trainer, arguments, columns of the data, the head, more arguments.
ROADS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, {"text": lambda t: t}, None, {"max_length": LENGTH}),
    "completions": (
        trl.SFTTrainer,
        trl.SFTConfig,
        {"prompt": begin, "completion": lambda t: t[len(begin(t)) :]},
        None,
        {"max_length": LENGTH},
    ),
    "DPO": (
        trl.DPOTrainer,
        trl.DPOConfig,
        {"prompt": begin, "chosen": lambda t: t[len(begin(t)) : 70], "rejected": lambda t: t[60:30:-1]},
        None,
        {"max_length": LENGTH},
    ),
    "Reward": (
        trl.RewardTrainer,
        trl.RewardConfig,
        {"chosen": lambda t: t[:60], "rejected": lambda t: t[60:0:-1]},
        transformers.LlamaForSequenceClassification,
        {"max_length": LENGTH},
    ),
    "GRPO": (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {"prompt": begin},
        None,
        {"max_completion_length": 12, "num_generations": 4},
    ),
    CACHED: (
        trl.GRPOTrainer,
        trl.GRPOConfig,
        {"prompt": begin},
        None,
        {"max_completion_length": 12, "num_generations": 4},
    ),
}


class Seeds(transformers.TrainerCallback):
    """What is generated does not hang on what a run drew before."""

    def on_step_begin(self, args, state, control, **_):
        transformers.set_seed(state.global_step)


def make(kind, wrap, folder):
    cls, configuration, columns, head, more = ROADS[kind]
    data = datasets.Dataset.from_dict({name: [f(t) for t in sentences()[:32]] for name, f in columns.items()})
    generates = cls is trl.GRPOTrainer
    model = llama(use_cache=kind == CACHED, **DEEP) if head is None else llama(head, num_labels=1)
    args = configuration(
        output_dir=str(folder), max_steps=STEPS, save_steps=3, logging_steps=1, per_device_train_batch_size=BATCH,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, seed=7,
        gradient_checkpointing=kind in CHECKPOINTED, **more,
    )  # fmt: skip
    rewards = {"reward_funcs": variety} if generates else {}
    references = {"ref_model": wrap(llama(**DEEP))} if kind == "DPO" else {}
    return cls(
        model=wrap(model), args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[Seeds()],
        **rewards, **references,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ROADS)
def test_training_saving_and_resuming(kind, tmp_path):
    generates = ROADS[kind][0] is trl.GRPOTrainer
    ours, theirs = make(kind, ORTModule, tmp_path / "ours"), make(kind, lambda model: model, tmp_path / "theirs")
    for trainer in (ours, theirs):
        transformers.set_seed(7)
        trainer.train()
    for key in (
        "loss",
        "grad_norm",
        *(["reward"] if generates else ["mean_token_accuracy"] if not ROADS[kind][3] else []),
    ):
        found, expected = losses(ours, key), losses(theirs, key)
        assert len(found) == STEPS and found == pytest.approx(expected, rel=2e-3, abs=1e-5), key
    if generates:
        report = explain(ours.model)
        assert_in_engine(ours.model, report.engine_calls + report.pytorch_calls)
        assert report.engine_calls > STEPS and report.python_ops == ["ChunkedLogProbFunction"], str(report)
        # (A cache of any length is one graph: the training step, the prompt, and all tokens after it.)
        assert report.exports == 3 if kind == CACHED else report.exports <= 3
    else:
        assert_in_engine(ours.model, STEPS)
        assert kind != "DPO" or explain(ours.model).exports == 1

    path = tmp_path / "ours" / f"checkpoint-{STEPS}"
    assert_same_weights(type(theirs.model).from_pretrained(path), ours.model)
    again = make(kind, ORTModule, tmp_path / "again")
    transformers.set_seed(7)
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert losses(again) == pytest.approx(losses(ours), rel=2e-3, abs=1e-5)
