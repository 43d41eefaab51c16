"""Lists who is measured: a column is a way to run a row's model and an optimizer for it.

A column of another environment (`ort`: ONNX Runtime Training, which needs an older PyTorch) runs in a process of its
own, whose Python is given on the command line. It takes its turns like the others, and waits between them.
"""

import copy
import io
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import transformers

from benchmarks.rows import EVERY


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def ortmodule(model):
    from ortmodule import ORTModule

    return ORTModule(model)


def ort(model):
    from onnxruntime.training.ortmodule import ORTModule

    return ORTModule(model)


def liger(model):
    """With the Triton kernels of Liger-Kernel, for the kinds of models that it knows."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model)
    return model


def no_liger(model):
    if find_spec("liger_kernel") is None:
        return "Liger-Kernel is not installed"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

    kind = getattr(getattr(model, "config", None), "model_type", None)
    return None if kind in KNOWN else f"Liger-Kernel has nothing for {kind}"


@dataclass(frozen=True)
class Column:
    wrap: Callable = lambda model: model
    optimizer: Callable = adamw
    missing: Callable = lambda model: None  # why it cannot be measured with this model


#: The first column given on the command line is what the others are compared with.
COLUMNS = {
    "eager": Column(),
    "ortmodule": Column(ortmodule),
    "compile": Column(torch.compile),
    "compile-dynamic": Column(partial(torch.compile, dynamic=True)),
    "compile-max": Column(partial(torch.compile, mode="max-autotune")),
    "liger": Column(liger, missing=no_liger),
    "ort": Column(ort),
}


class Trainee:
    """One column's copy of the model. ``loss``: of the latest step."""

    def __init__(self, column, model, autocast=None, device="cpu"):
        self.model = column.wrap(copy.deepcopy(model).to(device))
        self.optimizer = column.optimizer(self.model.parameters())
        self.autocast, self.device = autocast, device
        self.loss = self.schedule = None

    def plan(self, steps):
        """The learning rate rises over the first tenth of so many steps, and falls to 0 over the others."""
        self.schedule = transformers.get_linear_schedule_with_warmup(self.optimizer, steps // 10, steps)

    def now(self):
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, batch):
        """Seconds of each phase."""
        batch = {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        marks = [self.now()]
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            outputs = self.model(**batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        del outputs
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        marks.append(self.now())
        self.loss = loss.item()
        return [b - a for a, b in zip(marks, marks[1:], strict=False)]

    def close(self):
        """Nothing has to be let go."""


def trainee_of(name, key, model, args):
    """The column ``name`` of the row ``key``, to be closed at the end."""
    if name == "ort":
        return Peer(args.ort_python, key, name, model, args.autocast)
    return Trainee(COLUMNS[name], model, args.autocast, args.device)


# --- another environment ----------------------------------------------------------------------------------------------


class Peer:
    """A column that runs in another Python. Steps as a `Trainee` does."""

    def __init__(self, python, row, column, model, autocast=None):
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.columns"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        kind = None if autocast is None else str(autocast).removeprefix("torch.")
        weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        self.loss = None
        self._ask(("build", row, column, kind, weights))

    def plan(self, steps):
        self._ask(("plan", steps))

    def step(self, batch):
        """Seconds of each phase."""
        phases, self.loss = self._ask(("step", {name: tensor.numpy() for name, tensor in batch.items()}))
        return phases

    def close(self):
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, question):
        send(self._process.stdin, question)
        answer = receive(self._process.stdout)
        if answer is None:
            raise RuntimeError(f"{self._process.args[0]} ended with code {self._process.wait()}")
        return answer


def send(stream, value):
    data = pickle.dumps(value)
    stream.write(struct.pack("q", len(data)) + data)
    stream.flush()


def receive(stream):
    """None at the end."""
    header = stream.read(8)
    return pickle.load(io.BytesIO(stream.read(*struct.unpack("q", header)))) if len(header) == 8 else None


def main():
    """Answers the questions of a `Peer`."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever is printed is no answer
    trainee = None
    while (question := receive(sys.stdin.buffer)) is not None:
        if question[0] == "build":
            _, row, column, autocast, weights = question
            model = EVERY[row].build().train()
            model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()}, strict=False)
            trainee = Trainee(COLUMNS[column], model, None if autocast is None else getattr(torch, autocast))
            send(answers, "ready")
        elif question[0] == "plan":
            trainee.plan(question[1])
            send(answers, "ready")
        else:
            batch = {name: torch.from_numpy(array) for name, array in question[1].items()}
            send(answers, (trainee.step(batch), trainee.loss))


if __name__ == "__main__":
    main()
