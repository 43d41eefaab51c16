"""The switch for `torch.autograd.Function` inside of modules."""

from ortmodule.options import set_default


def enable_custom_autograd_support(to_enable=True):
    """The default of ``ORTMODULE_ENABLE_CUSTOM_AUTOGRAD`` for modules that are wrapped from now on."""
    set_default("ENABLE_CUSTOM_AUTOGRAD", bool(to_enable))
