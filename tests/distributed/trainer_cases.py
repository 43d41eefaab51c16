"""Trains by ORTTrainer with the model divided among processes, and compares with all of it in one process."""

import copy
from pathlib import Path

import torch
from onnx.reference import ReferenceEvaluator
from torch import distributed, nn

from ortmodule import ORTTrainer, ORTTrainerOptions, explain
from ortmodule.optim import AdamConfig, DynamicLossScaler, LambConfig, SGDConfig

WORDS, WIDTH, HEADS, LENGTH = 20, 16, 4, 6
DESCRIPTION = {
    "inputs": [("ids", ["batch", "length"]), ("keep", ["batch", "length"]), ("labels", ["batch", "length"])],
    "outputs": [("loss", [], True), ("logits", ["batch", "length", WORDS])],
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Layer(nn.Module):
    """As models of Hugging Face have it: heads are as many as there are features."""

    def __init__(self, dropout):
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # the softmax does not depend on one: its gradient is rounding
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.before, self.between, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x, mask):
        rows, length, _ = x.shape
        y = self.before(x)
        heads = [
            f(y).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        ]
        found = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.dropout(self.out(found.transpose(1, 2).reshape(rows, length, -1)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.between(x)))))


class Model(nn.Module):
    """Its first and its last layer have one weight, a mask of the inputs goes to all, and some weights have no use."""

    def __init__(self, dropout=0.0, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(WIDTH))  # by the last stage

    def forward(self, ids, keep):
        mask = keep[:, None, None].bool()
        x = self.table(ids) + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, mask)
        if self.training:
            self.seen.copy_(self.norm.weight.detach() * x.shape[-1])
        return self.head(self.norm(x))


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(count, rows=8, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids, labels = (torch.randint(WORDS, (rows, length), generator=generator) for _ in range(2))
        keep = (torch.arange(length) < torch.randint(2, length, (rows, 1), generator=generator)).long()
        found.append((ids, keep, labels))
    return found


def trainer(distributed_options=None, *, accumulation=1, config=None, dropout=0.0, mixed=None, model=None):
    options = {"batch": {"gradient_accumulation_steps": accumulation}}
    if distributed_options is not None:
        size, rank = distributed.get_world_size(), distributed.get_rank()
        options["distributed"] = {"world_size": size, "world_rank": rank, **distributed_options}
    if mixed is not None:
        options["mixed_precision"] = mixed
    config = config or AdamConfig([{"params": ["head.bias"], "lr": 0.02}], lr=0.01, lambda_coef=0.1, max_norm_clip=0.5)
    return ORTTrainer(model or Model(dropout), DESCRIPTION, config, loss_of, ORTTrainerOptions(options))


def whole(made):
    """All weights, on rank 0."""
    return {name: t.clone() for name, t in made.state_dict()["model"].items()}


def _same_as_alone(rank, how, config=None, data=batches, steps=6, evaluates=True):
    """Losses, outputs, weights and predictions, as of one process that has the whole model and all batches."""
    ours = trainer(how, accumulation=2, config=config)
    size, place = ours.data_parallel_size, ours.data_parallel_rank
    alone = trainer(accumulation=2, config=config) if rank == 0 or size == 1 else None
    for step, batch in enumerate(data(steps)):
        mine = [t[place::size] for t in batch]
        found = ours.train_step(*mine)
        expected = alone.train_step(*batch) if alone else None
        if size == 1:
            torch.testing.assert_close(found, expected, **CLOSE, msg=lambda text, step=step: f"step {step}: {text}")
    if evaluates:
        found, predicted = ours.eval_step(*mine), ours.eval_step(*mine[:2])
        expected = alone.eval_step(*mine) if alone else found
        torch.testing.assert_close((*found, predicted), (*expected, expected[1]), **CLOSE)
    found = whole(ours)
    if rank == 0:
        torch.testing.assert_close(found, whole(alone), **CLOSE)
    report = explain(ours.engine)
    assert report.captured and not report.pytorch_calls, report
    return ours


def _resumed(rank, folder, how):
    """A checkpoint goes on with the same bits in as many processes, and is that of a whole model in one: there and
    back."""
    path, data = str(Path(folder) / "state.pt"), batches(5)
    first = trainer(how, dropout=0.3)
    for batch in data[:3]:
        first.train_step(*batch)
    first.save_checkpoint(path, {"epoch": 1})
    saved = copy.deepcopy(first.state_dict())  # its tensors are those that train
    after = [first.train_step(*batch) for batch in data[3:]]
    other = trainer(how, dropout=0.3)
    if how is HORIZONTAL:  # loaded behind its first step, the other before it
        other.train_step(*data[0])
    assert other.load_checkpoint(path) == {"epoch": 1}
    torch.testing.assert_close([other.train_step(*batch) for batch in data[3:]], after, rtol=0, atol=0)
    torch.testing.assert_close(whole(other), whole(first), rtol=0, atol=0)
    alone, whole_path = trainer(), path.replace("state", "alone")
    alone.load_checkpoint(path)
    if rank == 0:
        assert len(saved["optimizer"]["state"]) == len(list(alone.model.parameters())) - 2  # two have no use
        _assert_same_state(alone.state_dict(), copy.deepcopy(saved))
        alone.save_checkpoint(whole_path)
    distributed.barrier()
    other.load_checkpoint(whole_path)
    found = other.state_dict()
    if rank == 0:
        _assert_same_state(found, saved)


def _assert_same_state(found, expected):
    for part in (found, expected):  # PyTorch adds settings to loaded groups
        part["groups"] = [(g["params"], g["lr"], g["weight_decay"]) for g in part["optimizer"].pop("param_groups")]
    for part in ("model", "optimizer", "groups", "steps"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0, msg=lambda text, p=part: f"{p}: {text}")


def _overflow(rank, how):
    """An infinite gradient in one process's part leaves the update out in all, and training goes on."""
    made = trainer(how, mixed={"enabled": True, "dtype": "bfloat16", "loss_scaler": DynamicLossScaler(loss_scale=4.0)})
    data = batches(3)
    made.train_step(*data[0])
    before, scale = whole(made), made.loss_scaler.loss_scale
    name = "layers.0.down.weight"  # in the first stage, or a part of it in each process
    parameter = dict(made.model.named_parameters())[name]
    hook = parameter.register_hook(lambda grad: grad * float("inf") if rank == 0 else grad)
    made.train_step(*data[1])
    hook.remove()
    assert not made.train_step_info.all_finite and made.loss_scaler.loss_scale == scale / 2
    after = whole(made)
    assert all(torch.equal(after[name], before[name]) for name in after if name != "seen")  # forward did run
    made.train_step(*data[2])
    assert made.train_step_info.all_finite
    after = whole(made)
    assert rank or not torch.equal(after[name], before[name])


def _written(rank, folder, made):
    """`save_as_onnx` writes the whole model."""
    other = batches(2)[1]
    path = Path(folder) / "model.onnx"
    made.save_as_onnx(path)
    weights = whole(made)
    if rank == 0:
        model = Model()
        model.load_state_dict(weights)
        names = ("ids", "keep")
        feeds = {name: t.numpy() for name, t in zip(names, other, strict=False)}
        found = torch.from_numpy(ReferenceEvaluator(str(path)).run(None, feeds)[0])
        torch.testing.assert_close(found, model.eval()(*other[:2]).detach(), rtol=1e-3, atol=1e-4)


PIPELINE = {"pipeline_parallel_size": 2, "num_pipeline_micro_batches": 2}
HORIZONTAL = {"horizontal_parallel_size": 2}


def of_lengths(count):
    """Batches of several lengths."""
    return [batch for i in range(count) for batch in batches(i + 1, length=(LENGTH, 9, 7)[i % 3])[i:]]


def trainer_pipeline(rank, folder):
    """Stages with a mask and a weight in common; 1F1B and, with fewer micro-batches than stages, GPipe."""
    ours = _same_as_alone(rank, PIPELINE, data=of_lengths)
    assert ours.parallel_plan == ("layers.1",)
    other = dict(ours.model.named_parameters())[f"layers.{1 - rank}.up.weight"]
    assert other.isnan().all() and other.untyped_storage().nbytes() == 4  # the other stage's has no memory here
    _overflow(rank, PIPELINE)
    _written(rank, folder, ours)
    return "same"


def trainer_horizontal(rank, folder):
    """Heads and the wider product of each layer are found and cut; the head has the table's weight, and is not."""
    ours = _same_as_alone(rank, HORIZONTAL, data=of_lengths)
    layer = ("query", "key", "value", "out", "up", "down")
    assert set(ours.parallel_plan) == {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert ours.model.layers[0].up.weight.to_local().shape == (WIDTH, WIDTH)
    _overflow(rank, HORIZONTAL)
    _written(rank, folder, ours)
    return "same"


def trainer_checkpoints(rank, folder):
    for how in (PIPELINE, HORIZONTAL):
        _resumed(rank, folder, how)
    return "same"


def trainer_and_data_parallel(rank, folder):
    """Four processes: two models, each in two processes, with other rows of a batch; cuts that the options name."""
    cut = {"pipeline_parallel_size": 2, "pipeline_cut_info_string": "layers.1.between"}
    made = _same_as_alone(rank, cut, LambConfig(lr=0.01), steps=4, evaluates=False)
    assert (made.data_parallel_size, made.data_parallel_rank) == (2, rank % 2)
    assert made.parallel_plan == ("layers.1.between",)
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    how = {**HORIZONTAL, "data_parallel_size": 2, "horizontal_parallel_plan": plan}
    made = _same_as_alone(rank, how, SGDConfig(lr=0.1), steps=4, evaluates=False)
    assert (made.data_parallel_size, made.data_parallel_rank) == (2, rank // 2)
    assert len(made.parallel_plan) == 4
    return "same"


def _refused(how, text, *, model=None, description=None, data=None):
    made = trainer(how, model=model)
    if description is not None:
        made.model_desc = description
    try:
        made.train_step(*(data or batches(1)[0]))
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


class Apart(nn.Module):
    """Between its two products is the mean of all features: each process cannot compute its own."""

    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.down, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.between = self.norm if norm else lambda x: x - x.mean(-1, keepdim=True)

    def forward(self, ids, keep):
        return self.head(self.norm(self.down(self.between(self.up(self.table(ids))))))


def trainer_messages(rank, folder):
    """What cannot be divided is refused in all processes, by a sentence that names the option."""
    option = "the option distributed."
    _refused({**PIPELINE, "pipeline_cut_info_string": "layers.7"}, f"{option}pipeline_cut_info_string names layers.7")
    _refused({**PIPELINE, "pipeline_cut_info_string": "layers.0, layers.1"}, "names 2 modules, and 2 stages")
    _refused({**PIPELINE, "num_pipeline_micro_batches": 3}, "the input ids has the shape [8, 6]: axis 0 cannot be cut")
    _refused({**PIPELINE, "sliced_axes": {"ids": 2}}, f"{option}sliced_axes has axis 2 of ids, described with 2")
    _refused({**PIPELINE, "sliced_tensor_names": ["x"]}, f"{option}sliced_tensor_names names x; described are ids")
    _refused({**PIPELINE, "sliced_schema": {"ids": [4, 5]}}, "has ids as [4, 5], and a micro-batch has [4, 6]")
    _refused({"pipeline_parallel_size": 2}, "no ModuleList or Sequential of 2 layers", model=Model(layers=1))
    _refused({**HORIZONTAL, "horizontal_parallel_plan": {"layer.*": "colwise"}}, "has 'layer.*', and the model has no")
    _refused({**HORIZONTAL, "horizontal_parallel_plan": {"head": "columns"}}, "not 'columns'")
    _refused(HORIZONTAL, "no two torch.nn.Linear of the model were found that can be cut", model=Apart())
    wrong = {"up": "colwise", "down": "rowwise"}
    for norm in (False, True):
        _refused({**HORIZONTAL, "horizontal_parallel_plan": wrong}, "compute something else", model=Apart(norm))
    _refused(HORIZONTAL, "the input ids is another in another process", data=batches(2)[rank])
    made = trainer(PIPELINE)
    try:
        made.save_checkpoint(Path(folder) / "early.pt")
    except RuntimeError as error:
        assert "needs a train_step before" in str(error)
    return "same"
