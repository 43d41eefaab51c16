"""Runs one piece of a graph that submodules break, with a plan and an autograd node of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch

from ortmodule.capture.dynamic_dims import Capture
from ortmodule.core.config import Config
from ortmodule.core.dtypes import as_pairs
from ortmodule.core.errors import Incomparable, StateError, Unknown
from ortmodule.core.names import INPUT
from ortmodule.core.onnx_utils import constants
from ortmodule.engine.autotune import Tuning
from ortmodule.guards.guards import Guards
from ortmodule.guards.module_tree import Tree
from ortmodule.lowering.cuts.graph_cuts import Piece
from ortmodule.runtime.compiled_graph import CompiledGraph
from ortmodule.runtime.executable import Flags, seed_of
from ortmodule.runtime.rng_replay import RandomValue, RngReplay
from ortmodule.runtime.tensors.feeds import fed

#: What an ONNX interpreter is: it computes nodes' outputs into values; `debug/onnx_interpreter.py`.
Interpreter = Callable[[Sequence[onnx.NodeProto], dict[str, torch.Tensor], dict[str, torch.Tensor]], None]


class PieceCall:
    """The call of one piece."""

    __slots__ = ("inputs", "shapes", "generators")

    def __init__(self, inputs: list[torch.Tensor], generators: list[torch.Generator]) -> None:
        self.inputs, self.generators = inputs, generators
        self.shapes = tuple([t.shape for t in inputs])


class PieceGraph(CompiledGraph):
    """One piece; a call returns the values of ``piece.outputs``."""

    def __init__(
        self, piece: Piece, capture: Capture, tree: Tree, guards: Guards, examples: list[torch.Tensor], config: Config,
        tuning: Tuning | None, results: set[int], interpret: Interpreter,
    ) -> None:  # fmt: skip
        """``examples``: small inputs. ``results``: places of outputs that are results of the module, and no more."""
        self.piece, self._results, self._interpret = piece, results, interpret
        super().__init__(capture, tree, guards, examples, config, tuning)

    def _first_prediction(self, ranks: Sequence[int]) -> Flags:
        """What other pieces and breaks use receives a gradient, and of results losses, if there are any."""
        losses = [i for i in self.differentiable if i in self._results and ranks[i] == 0]
        left = self._results - set(losses) if losses else set()
        chosen = [i for i in self.differentiable if i not in left]
        return tuple([i in chosen for i in range(len(self.session.outputs))])

    def _result(self, call: Any, outputs: Sequence[torch.Tensor]) -> Any:
        return outputs[: self.n_results]

    def _of_caller(self, inputs: Sequence[torch.Tensor]) -> Any:
        named = zip(self.piece.inputs, inputs, strict=True)
        return {int(name.removeprefix(INPUT)): t for name, t in named if name.startswith(INPUT)}

    def recomputed(
        self, call: Any, tensors: Sequence[torch.Tensor], seed: int, before: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As :meth:`CompiledGraph.recomputed`: PyTorch computes the piece's nodes, one after the other."""
        model = self.capture.model
        feeds = dict(zip(self.session.inputs, tensors, strict=True))
        try:
            values = RngReplay(model, self.session.known).of({n: t.detach() for n, t in feeds.items()}, seed)
            drawn = {value.node.output[0]: value.tensor for value in values}
            with torch.enable_grad():
                stands = {name: t.view_as(t) if t.requires_grad else t for name, t in feeds.items()}
            found = self._interpreted(stands, drawn, True)
        except (Unknown, Incomparable) as error:
            raise StateError(
                f"create_graph=True: PyTorch cannot compute a part of the module once more, which is beside a "
                f"submodule that it runs by itself: {error}"
            ) from error
        results = [found[name] for name in self.session.outputs[: self.n_results]]
        return results, [stands[self.session.inputs[i]] for i in self.leaves]

    def in_pytorch(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The piece's outputs, where the engine cannot compute them. Raises Unknown where PyTorch cannot, either."""
        if self.is_random or self.writes or self.piece.calls or self.pairs:
            raise Unknown("numbers that are drawn, or a buffer that changes")
        feeds = dict(zip(self.session.inputs, fed(self.feeds, inputs), strict=True))
        found = self._interpreted(feeds, {}, torch.is_grad_enabled())
        return [found[name] for name in self.session.outputs[: self.n_results]]

    def _interpreted(
        self, values: dict[str, torch.Tensor], drawn: dict[str, torch.Tensor], grad: bool
    ) -> dict[str, torch.Tensor]:
        model = self.capture.model
        device = next((t.device for t in values.values()), torch.device("cpu"))
        with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=False), torch.device(device):
            found = {name: t.to(device) for name, t in constants(model).items()} | values
            self._interpret(model.graph.node, found, drawn)
        return found


@dataclass
class PieceDraw:
    """A run of a piece that draws numbers."""

    piece: PieceGraph
    inputs: list[torch.Tensor]
    generators: Any  # torch's, before it

    def values(self) -> list[RandomValue]:
        """What it drew. Raises Incomparable where that cannot be told."""
        held = [as_pairs(t.detach()).contiguous() for t in fed(self.piece.feeds, self.inputs)]
        feeds = dict(zip(self.piece.session.inputs, held, strict=True))
        return RngReplay(self.piece.capture.model, self.piece.session.known).of(feeds, seed_of(self.generators))
