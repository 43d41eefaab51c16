"""Provides the original's switch for custom autograd functions, under its name."""

from ortmodule.core.config import set_default


def enable_custom_autograd_support(to_enable: bool = True) -> None:
    """The default of ``ORTMODULE_ENABLE_CUSTOM_AUTOGRAD`` for modules that are wrapped from now on.

    On: a `torch.autograd.Function` becomes a node of the graph. Off: PyTorch runs the module that uses one.
    """
    set_default("ENABLE_CUSTOM_AUTOGRAD", bool(to_enable))
