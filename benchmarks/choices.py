"""Measures what the engine chooses between on a GPU, side by side: where the choice should lie.

    python -m benchmarks.choices attention --out results/attention
    python -m benchmarks.choices products --out results/products

attention: torch's kernels, asked for everywhere, beside products and softmax, at more and more scores. products: two
linear layers with GELU's tanh form between them, with cuBLASLt's epilogues beside chains of pointwise operators, each
with the algorithms that the library guesses beside those that measuring has chosen (ORTMODULE_ENABLE_TUNING).

Everything is forward and backward of a plan, started kernel by kernel: what takes a GPU less time than the host is as
fast as the host. The ways take turns; in a turn one runs so often that it takes a while, between two events of the GPU,
waited for at the end only. Figures are medians of turns with the middle half. Each row that was measured is
kept in the folder <out>-rows: another call goes on with the next.
Written to <out>.json and <out>.md.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from onnx import TensorProto, helper

from benchmarks.large import Clock, finished
from benchmarks.report import machine, middle, write
from ortmodule import _core
from ortmodule.engine.session import DTYPES, ENGINE_ERRORS, Run, Session, aligned_bytes, gpu_of, stream_of

KINDS = {torch.bfloat16: TensorProto.BFLOAT16, torch.float16: TensorProto.FLOAT16, torch.bool: TensorProto.BOOL}
HEADS, WIDTH = 16, 64  # of attention
A_WHILE = 0.02  # seconds of a turn


def constant(name, tensor):
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorProto(name=name, data_type=KINDS[tensor.dtype], dims=list(tensor.shape), raw_data=raw)


def session(nodes, inputs, constants=(), without=()):
    """Of (operator, inputs, output, attributes) rows; the last one's output is the model's."""
    graph = helper.make_graph(
        [helper.make_node(op.split("::")[-1], ins.split(), [out], domain=op.partition("::")[0] if "::" in op else "",
                          **attrs) for op, ins, out, attrs in nodes],
        "choice",
        [helper.make_tensor_value_info(f"x{i}", KINDS[t.dtype], list(t.shape)) for i, t in enumerate(inputs)],
        [helper.make_tensor_value_info(nodes[-1][2], KINDS[inputs[0].dtype], None)],
        initializer=[constant(name, tensor) for name, tensor in constants],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("ortmodule", 1)]
    return Session(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString(), without)


@dataclass
class Way:
    """A plan. `algorithms`: of products, those that were measured; None: whatever is chosen without."""

    plan: object
    inputs: list
    dy: torch.Tensor
    algorithms: dict | None = None
    notes: dict = field(default_factory=dict)

    def step(self):
        Run(self.plan, self.inputs, 0).backward([self.dy])

    def prepare(self):
        """Before its turn: products that have run keep their algorithm until all are forgotten."""
        if self.algorithms is None:
            return
        _core.tuning_clear()
        gpu = gpu_of(self.inputs)
        for product, algorithm in self.algorithms.items():
            if gpu is None:
                _core.tuning_set(product, algorithm)
            else:
                _core.cuda_tuning_set(gpu.index or 0, product, algorithm)


def way_of(made, inputs, shape):
    specs = [(DTYPES[t.dtype], tuple(t.shape)) for t in inputs]
    plan = made.plan(specs, [True] * len(inputs), [True], gpu=gpu_of(inputs))
    return Way(plan, inputs, torch.randn(shape, device=inputs[0].device).to(inputs[0].dtype))


# --- attention --------------------------------------------------------------------------------------------------------

ATTENTION = [
    {"dtype": dtype, "batch": batch, "length": length, "causal": causal}
    for dtype in ("bfloat16", "float16")
    for causal in (False, True)
    for length, batches in ((256, (1, 4, 16, 64)), (512, (1, 4, 16)), (1024, (1, 4, 16)), (2048, (1, 4)), (4096, (1,)))
    for batch in batches
]


def attention(size, device):
    """As models have it: of what linear layers make, heads behind tokens."""
    batch, length = size["batch"], size["length"]
    shape, dtype = (batch, length, size.get("heads", HEADS), WIDTH), getattr(torch, size["dtype"])
    inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(3)]
    constants = [("scale", torch.full((1,), WIDTH**-0.5, dtype=dtype))]
    softmax = ("Softmax", "scaled", "weights", {"axis": -1})
    if size["causal"]:
        constants.append(("allowed", torch.ones(length, length, dtype=torch.bool).tril()))
        softmax = ("ortmodule::MaskedSoftmax", "scaled allowed", "weights", {})
    nodes = [
        ("Transpose", "x0", "q", {"perm": [0, 2, 1, 3]}),
        ("Transpose", "x1", "k", {"perm": [0, 2, 3, 1]}),
        ("Transpose", "x2", "v", {"perm": [0, 2, 1, 3]}),
        ("MatMul", "q k", "scores", {}),
        ("Mul", "scores scale", "scaled", {}),
        softmax,
        ("MatMul", "weights v", "heads", {}),
        ("Transpose", "heads", "y", {"perm": [0, 2, 1, 3]}),
    ]
    apart = way_of(session(nodes, inputs, constants, ("attention_fusion", "efficient_attention")), inputs, shape)
    one = way_of(session(nodes, inputs, constants), inputs, shape)
    text = one.plan.text()
    one.notes["kernels"] = "torch" if "torch=1" in text or "torch=2" in text else "ours"
    return {"products": apart, "one operator": one}


def scores_of(size):
    return size["batch"] * size.get("heads", HEADS) * size["length"] ** 2


def faster_from(gains):
    """Of (scores, gain): the number of scores from which on there are gains alone; None: nowhere."""
    slow = max((scores for scores, gain in gains if gain <= 1), default=0)
    return min((scores for scores, _ in gains if scores > slow), default=None)


def attention_summary(rows):
    """A sentence for each type and mask."""
    kinds = {}
    for size, found in rows:
        gain = found["products"]["median"] / found["one operator"]["median"]
        kinds.setdefault((size["dtype"], size["causal"]), []).append((scores_of(size), gain))
    for (dtype, causal), gains in kinds.items():
        least = faster_from(gains)
        where = "for none of the largest numbers of scores" if least is None else f"from {least:,} scores on"
        yield f"{dtype}, {'causal' if causal else 'without a mask'}: one operator is faster {where}."


# --- products ---------------------------------------------------------------------------------------------------------

PRODUCTS = [
    {"dtype": dtype, "tokens": tokens, "width": width}
    for dtype in ("bfloat16", "float16")
    for tokens in (2048, 8192, 32768)
    for width in (768, 1024, 2048, 4096)
    if tokens * width <= 2**26
]


def measured_algorithms(way):
    """{product: the fastest way}, and how many are not the first guess."""
    _core.tuning_clear()
    gpu = gpu_of(way.inputs)
    if gpu is None:
        found = _core.tune(way.plan)
        return {product: name for product, name, _ in found}, 0
    stream, memory = stream_of(gpu), None
    needed, found, _ = _core.cuda_tune(way.plan, 0, 0.0, memory, stream)
    if needed:
        memory = aligned_bytes(needed, gpu)
        found = _core.cuda_tune(way.plan, 0, 0.0, memory, stream)[1]
    others = sum(len(times) > 1 and min(times, key=times.get) != "0" for _, _, times in found)
    return {product: name for product, name, _ in found}, others


def products(size, device):
    tokens, width, dtype = size["tokens"], size["width"], getattr(torch, size["dtype"])
    shapes = [(tokens, width), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    inputs = [(torch.randn(s, device=device) * s[0] ** -0.5).to(dtype) for s in shapes]
    nodes = [
        ("MatMul", "x0 x1", "wide", {}),
        ("Add", "wide x2", "sum", {}),
        ("Gelu", "sum", "act", {"approximate": "tanh"}),
        ("MatMul", "act x3", "narrow", {}),
        ("Add", "narrow x4", "y", {}),
    ]
    ways = {}
    for name, without in (("chains", ["product_epilogue"]), ("epilogues", [])):
        guessed = way_of(session(nodes, inputs, without=without), inputs, shapes[0])
        algorithms, others = measured_algorithms(guessed)
        guessed.algorithms = {}
        notes = {"products": len(algorithms), "other than guessed": others}
        ways[name] = guessed
        ways[f"{name}, measured"] = Way(guessed.plan, inputs, guessed.dy, algorithms, notes)
    return ways


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    sizes: list
    ways: object  # (size, device) -> {name: Way}; the others are compared with the first
    summary: object = None  # ((size, {way: figure}) ...) -> sentences


SUBJECTS = {"attention": Subject(ATTENTION, attention, attention_summary), "products": Subject(PRODUCTS, products)}


def name_of(size):
    return "-".join(f"{key}-{value}" for key, value in size.items())


def measure(ways, device, turns):
    """{way: median and middle half of a step's seconds, with notes}."""
    clocks, often = {name: [] for name in ways}, {}
    for turn in range(turns + 1):
        for name, way in ways.items():
            way.prepare()
            way.step()
            clock = Clock(device)
            clock.mark()
            for _ in range(often.get(name, 1)):
                way.step()
            clock.mark()
            if turn:
                clocks[name].append(clock)
            else:
                often[name] = max(1, round(A_WHILE / clock.seconds()[0]))
    finished(device)
    return {
        name: {**middle([c.seconds()[0] / often[name] for c in clocks[name]]), **way.notes}
        for name, way in ways.items()
    }


def cell(figure):
    return f"{1e3 * figure['median']:.3f} ±{5e2 * (figure['high'] - figure['low']):.3f}"


def markdown(subject, report):
    """A row each: the sizes, every way's time, and how many times as fast as the first way the others are."""
    found = [(row["size"], row["ways"]) for row in report["rows"] if "ways" in row]
    lines = []
    if found:
        sizes, ways = list(found[0][0]), list(found[0][1])
        heads = [*sizes, *(f"{way}, ms" for way in ways), *(f"× {way}" for way in ways[1:]), "notes"]
        lines += [
            "| " + " | ".join(heads) + " |",
            "|" + " --- |" * len(sizes) + " ---: |" * (2 * len(ways) - 1) + " --- |",
        ]
    for size, ways in found:
        first = next(iter(ways.values()))["median"]
        notes = [f"{k} {v}" for w in ways.values() for k, v in w.items() if k not in ("median", "low", "high")]
        cells = [*size.values(), *map(cell, ways.values())]
        cells += [f"{first / w['median']:.2f}" for w in list(ways.values())[1:]]
        lines.append("| " + " | ".join(map(str, [*cells, ", ".join(notes)])) + " |")
    lines += [f"\n{name_of(r['size'])}: failed: {r['failed']}" for r in report["rows"] if "failed" in r]
    if found and subject.summary and len(found) == len(subject.sizes):
        lines += ["", *subject.summary(found)]
    return "\n".join(lines) + "\n"


def row_of(subject, size, args, file):
    """What is in the file, unless that has failed; otherwise measured now."""
    if file.exists() and "failed" not in (row := json.loads(file.read_text())):
        return row
    torch.manual_seed(0)
    try:
        row = {"size": size, "ways": measure(subject.ways(size, args.device), args.device, args.turns)}
    except (
        *ENGINE_ERRORS,
        RuntimeError,
        MemoryError,
    ) as error:  # the engine's and torch's; the other rows are measured
        row = {"size": size, "failed": f"{type(error).__name__}: {error}"[:300]}
    file.write_text(json.dumps(row))
    return row


def run(args):
    subject, out = SUBJECTS[args.subject], Path(args.out)
    folder = out.parent / f"{out.name}-rows"
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(args.device), "subject": args.subject, "turns": args.turns, "rows": []}
    for size in subject.sizes:
        report["rows"].append(row_of(subject, size, args, folder / f"{name_of(size)}.json"))
        write(report, markdown(subject, report), out)
    print(markdown(subject, report))
    return 1 if any("failed" in row for row in report["rows"]) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--out", default="results/choices")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
