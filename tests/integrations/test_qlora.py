"""LoRA around layers of 4 bits (bitsandbytes): PyTorch runs these layers, the engine the rest; PyTorch's numbers."""

import copy

import pytest
import torch
import transformers

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("at_once")]
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

from ortmodule import ORTModule, explain  # noqa: E402
from tests.integrations.small import llama  # noqa: E402
from tests.integrations.test_peft import STEPS, batches, train  # noqa: E402

ADAPTED = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1).save_pretrained(path)
    return path


def base(folder):
    """As a script loads it."""
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu")
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def make(folder):
    model = base(folder)
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=ADAPTED, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters).train()


def test_training_saving_and_resuming(folder, tmp_path):
    ours, theirs = ORTModule(make(folder)), make(folder)
    (found, optimizer), (expected, _) = train(ours), train(theirs)
    assert found == pytest.approx(expected, rel=1e-4)
    layers = {path for path, m in theirs.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    layers = {path for path in layers if not hasattr(theirs.get_submodule(path), "base_layer")}
    report = explain(ours)
    assert report.captured and set(report.python_ops) == layers and len(layers) == 7, str(report)
    assert (report.engine_calls, report.pytorch_calls, report.unreached_steps) == (STEPS, 0, 0)

    ours.save_pretrained(tmp_path)
    plain = peft.PeftModel.from_pretrained(base(folder), tmp_path, is_trainable=True).train()
    pairs = [pair for pair in zip(plain.parameters(), ours.parameters(), strict=True) if pair[1].requires_grad]
    assert len(pairs) == 2 * len(ADAPTED) and all(torch.equal(*pair) for pair in pairs)
    other = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    more = list(batches(2))
    resumed = train(ORTModule(plain), other, more)[0]
    assert resumed == pytest.approx(train(ours, optimizer, more)[0], rel=1e-4)
