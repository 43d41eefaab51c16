"""Compares the numbers that Python read when a module was traced with those of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
import torch

from ortmodule.capture.trace_record import Trace
from ortmodule.core.errors import DoesNotHold, NotKnown
from ortmodule.core.onnx_utils import without_dead
from ortmodule.engine.session import ENGINE_ERRORS, Session
from ortmodule.host.host_node import Calls, DryCalls, Node

MOST_SHAPES = 4096  # of which is remembered whether a graph holds for them


class ReadChecks:
    """Compares the numbers that Python read from data and sizes in the trace with those of a run."""

    def __init__(self, trace: Trace, model: onnx.ModelProto, session: Session, n_results: int, plans: dict) -> None:
        """Of the graph ``model`` that runs in ``session``. ``n_results``: outputs that belong to the module's result.
        ``plans``: rest on what is known of nodes that PyTorch runs."""
        self._trace, self._session, self._model = trace, session, model
        self._first = n_outputs = n_results + sum(w.output is not None and not w.carries for w in trace.writes)
        self._tokens, self._part = 0, 1.0
        #: The outputs that hold what was read; None: nothing was.
        self.size = n_outputs if trace.size_reads else None
        self.data = n_outputs + bool(trace.size_reads) if trace.data_reads else None
        self.known: dict[tuple, DoesNotHold | None] = {}  # shapes -> what is wrong with them
        self.early: Session | None = None  # what is read, alone, where it comes first
        if trace.nodes and (known := session.known) is not None:
            self._tokens = sum(node.kind != "aten" for node in trace.nodes)  # outputs that stand for nodes
            known.plans.append(plans)
            for seen in trace.seen:
                known.learn(*seen)
            if trace.size_reads or trace.data_reads:
                self.early, _ = _only_outputs(self._model, n_outputs, self._tokens, trace.nodes)
                known.plans.append(self.early.plans)  # they rest on the same knowledge

    @property
    def places(self) -> list[int]:
        """The outputs that hold what was read."""
        return [i for i in (self.size, self.data) if i is not None]

    def always_first(self) -> None:
        """What is read comes before the rest in every run: pieces of the graph have effects."""
        if self.early is None and self.places:
            self.early, self._part = _only_outputs(self._model, self._first, 0, ())

    def come_first(self, missed: int, runs: int) -> bool:
        """Is it worth it to run what is read from data alone, before the rest? Of the runs so far ``missed`` did not
        hold, and ``runs`` did."""
        return self._can_be_first() and missed > self._part * (missed + runs)

    def _can_be_first(self) -> bool:
        if self.data is None or self._trace.nodes:
            return False
        if self.early is None:
            self.early, self._part = _only_outputs(self._model, self._first, 0, ())
        return True

    def check_after_error(self, shapes: tuple, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """As :meth:`check_early`, after an error of the engine's: it may refuse what Python would not have done with
        these values."""
        if not self._can_be_first():
            return
        try:
            self.check_early(shapes, tensors())
        except ENGINE_ERRORS as error:
            raise DoesNotHold(f"what it read from data is not there: {error}") from error

    def check_early(self, shapes: tuple, tensors: Sequence[torch.Tensor], calls: Calls | None = None) -> bool:
        """As :meth:`check`, before the rest runs, and a node has effects. False: what was read is not known before.
        ``calls``: of the run that comes, which does not draw again what was drawn here."""
        early, known = self.early, self._session.known
        if early is None:
            return True
        feeds = dict(zip(self._session.inputs, tensors, strict=True))
        given = [feeds[name] for name in early.inputs]
        try:
            dry = None if known is None else DryCalls(known)
            run = early.run(given, [False] * len(given), calls=dry)
        except NotKnown:
            return False
        outputs = run.outputs
        if calls is not None and dry is not None:
            calls.done |= {number: done for number, done in dry.done.items() if calls.known.nodes[number].draws}
        first = len(self._session.outputs) - self._tokens - len(outputs)
        self.check(shapes, outputs[:1] * first + outputs)  # those that come first are not looked at
        return True

    def check_before(self, shapes: tuple, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Raises DoesNotHold for sizes that were read and are others now; nothing runs but what computes them."""
        if self.size is None or shapes in self.known:
            return
        if self.early is None and not self._trace.nodes:
            self.early, self._part = _only_outputs(self._model, self._first, 0, ())
        self.check_early(shapes, tensors())

    def check(self, shapes: tuple, outputs: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> None:
        """``outputs``: those at :attr:`places` count. Raises DoesNotHold. Sizes are compared once for each shape,
        data every time."""
        if self.size is not None and shapes not in self.known:
            self._check_sizes(shapes, outputs[self.size])
        if self.data is not None:
            _compare(self._trace.data_reads, outputs[self.data], data=True)

    def _check_sizes(self, shapes: tuple, output: torch.Tensor) -> None:
        if len(self.known) >= MOST_SHAPES:
            self.known.clear()
        try:
            _compare(self._trace.size_reads, output)
            self.known[shapes] = None
        except DoesNotHold as reason:
            self.known[shapes] = reason
            raise


def _only_outputs(model: onnx.ModelProto, first: int, tokens: int, nodes: Sequence[Node]) -> tuple[Session, float]:
    """The outputs from ``first`` on, without the last ``tokens``, which stand for nodes that PyTorch runs; and how much
    of the graph that is."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.output[len(part.graph.output) - tokens :]
    del part.graph.output[:first]
    part = without_dead(part)
    return Session(part.SerializeToString(), nodes=nodes), len(part.graph.node) / len(model.graph.node)


def _compare(reads: Sequence, output: torch.Tensor, data: bool = False) -> None:
    values = output.tolist()
    for i, (read, value) in enumerate(zip(reads, values, strict=True)):
        if not read.is_value(value):
            text = f"{read.place} found {value:g}, and {read.value:g} when it was traced"
            found = [(before.place, values[k]) for k, before in enumerate(reads[: i + 1])] if data else ()
            raise DoesNotHold(text, read.place, value, tuple(found), read.submodule)
