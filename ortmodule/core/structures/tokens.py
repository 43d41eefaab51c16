"""Names the tokens, no types, by which :mod:`ortmodule.core.pytree` describes what is around tensors."""


class _Token:
    """A token that is no type."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


TENSOR = _Token("tensor")  # the next tensor
SPARSE = _Token("sparse")  # followed by sizes, whether it is coalesced, and two tensors: its indices and values
SPLIT = _Token("split")  # followed by a mesh and placements: the next tensor is this rank's part of a DTensor, a result
WHOLE = _Token("object")  # followed by its position among Structure.objects
NUMBER = _Token("number")  # followed by its type: the next tensor holds a Python number
SAME = _Token("same")  # followed by the number of a container that was met before
TWIN = _Token("twin")  # followed by the number of a tensor, an argument, that was met before
PARAMETER = _Token("parameter")  # the next tensor, an argument, is an nn.Parameter
HELD = _Token("held")  # followed by the place (``get()``) of a tensor, an argument, that the module holds, too
GENERATOR = _Token("generator")  # followed by its device: torch's, an argument
EMPTY = _Token("empty")  # followed by an object, an argument, that has no tensor inside
ARRAY = _Token("array")  # the next tensor, an argument, is an array of NumPy's
AS = _Token("as")  # followed by a type of NumPy's numbers: the next value, a number, is of that type
