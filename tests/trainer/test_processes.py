"""ORTTrainer on two processes: data parallel, ZeRO stage 1, AdaSum, accumulation, checkpoints."""

from tests.workers import ROOT, texts_of_two

WORKER = """
import datetime, os, sys, warnings
import torch, torch.distributed as dist
from ortmodule.optim import AdamConfig, LambConfig

rank, file, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.append(sys.argv[4])
from tests.trainer import small
warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))

def trainer(dropout=0.0, config=None, **distributed):
    options = {"distributed": {"world_size": 2, "world_rank": rank, **distributed},
               "batch": {"gradient_accumulation_steps": 2}}
    return small.trainer(options, dropout, small.ONLY_LOSS, config)

ZERO, LATE = {"deepspeed_zero_optimization": {"stage": 1}}, {"allreduce_post_accumulation": True}
data = small.batches(6)
mine = [(x[rank::2], label[rank::2]) for x, label in data]

for config in (AdamConfig(lr=0.01, lambda_coef=0.1), LambConfig(lr=0.01)):
    alone = small.trainer({"batch": {"gradient_accumulation_steps": 2}}, 0.0, small.ONLY_LOSS, config)
    for batch in data:
        alone.train_step(*batch)
    for how in ({}, LATE, {**ZERO, **LATE}):
        ours = trainer(config=config, **how)
        for batch in mine:
            ours.train_step(*batch)
        for p, q in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        print("same", type(ours.optimizer).__name__, flush=True)

for how in ({}, ZERO):
    path = os.path.join(folder, f"{len(how)}.pt")
    first = trainer(0.3, **how)
    for batch in mine[:4]:
        first.train_step(*batch)
    first.save_checkpoint(path, {"epoch": 1})
    found = [first.train_step(*batch) for batch in mine[4:]]
    other = trainer(0.3, **how)
    assert other.load_checkpoint(path) == {"epoch": 1}
    assert [other.train_step(*batch) for batch in mine[4:]] == found
    for p, q in zip(first.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p, q)
    print("resumed", flush=True)
    if not how:
        first.train_step(*mine[0])
        try:
            first.save_checkpoint(path)
        except RuntimeError as error:
            print(error, flush=True)

adasum, mean = trainer(enable_adasum=True), trainer()
for batch in mine[:2]:
    adasum.train_step(*batch), mean.train_step(*batch)
print("adasum", torch.equal(adasum.model[0].weight, mean.model[0].weight), flush=True)
try:
    small.trainer({"distributed": {"world_size": 3}})
except ValueError as error:
    print(error, flush=True)
dist.barrier()
os._exit(0)  # gloo's threads may outlive the group
"""


def test_two_processes(tmp_path):
    for text in texts_of_two(WORKER, tmp_path, str(tmp_path), str(ROOT)):
        expected = ["FusedAdam", "FusedAdam", "ZeroRedundancyOptimizer"]
        expected += ["FusedLamb", "FusedLamb", "ZeroRedundancyOptimizer"]
        assert [line.split()[1] for line in text.splitlines() if line.startswith("same")] == expected, text
        assert text.count("resumed") == 2 and "adasum False" in text, text
        assert "a checkpoint of 2 processes is made after an update, not after 1 of 2 accumulated steps" in text
        assert "world_size and world_rank are 3 and 0, the process group has 2" in text
