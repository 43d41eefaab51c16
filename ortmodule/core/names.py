"""Names the constants that several packages share: names in a graph, opsets, reasons, folders."""

import os
from importlib.metadata import PackageNotFoundError, version

from ortmodule import _core

OPSETS = range(17, 21)
DEFAULT_OPSET = 18
#: Scripts written for ONNX Runtime's ORTModule name opsets from this one on.
OLDEST_OPSET = 9

#: The domain of operators that are ours.
DOMAIN = "ortmodule"

#: Names in the graph: `input/0`, ..., and `state/` with the path of a parameter, buffer or plain tensor.
INPUT, STATE = "input/", "state/"

CHECKPOINT = "torch.utils.checkpoint"
#: In the names of nodes that lie in one, with its number: a step of the path.
CHECKPOINT_STEP = _core.checkpoint_step
#: It asks in backward whether `.backward()` was called for all leaves, which is not so for a part of a module.
#: In reasons: what a submodule returns is one of its arguments in some calls, and a tensor of its own in others.
RETURNS_GIVEN = "returns what it is given in some calls, and something else in others"
REENTRANT = f"{CHECKPOINT} with use_reentrant=True"
#: Behind the name of what changes one, in the reason why PyTorch runs a submodule.
CHANGES_PARAMETER = "changes the parameter"

#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

try:
    VERSION = version("ortmodule")
except PackageNotFoundError:  # run from a source tree
    VERSION = "0.0.0"
#: What tensors of a trace, and those that a submodule is given which PyTorch runs, are no answer to.
ONLY_CALLER = "which only the caller's own tensors tell"
#: What can neither be seen nor be put back.
ADVANCES = "takes the next of an iterator that was there before the call, which no graph repeats"
#: A run without gradients has none to give, inside of a submodule either.
RECORDS = "has autograd record (torch.enable_grad()), where the call does not"
#: The reason why a graph is not made where there is no work that could go past the engine.
NOTHING = "forward computes nothing"
USED_ON = "forward puts a tensor into a list or a dictionary that it was given, or an attribute, and goes on with it"
