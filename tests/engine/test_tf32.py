"""One setting of TF32 is read, whichever of torch's many was set, as torch's own kernels read it.

Without a warning or an error. Each in a process of its own, since torch remembers that the older ones were used.
"""

import os
import sys
import warnings

import pytest
import torch

from ortmodule.engine.session import math_mode

MATMUL, CUDNN = "torch.backends.cuda.matmul", "torch.backends.cudnn"
#: What is set, in this order, and what may be rounded then: products, convolutions; None: that depends on the version.
SETTINGS = [
    ([], False, True),
    ([f"{MATMUL}.allow_tf32 = True"], True, True),
    ([f"{MATMUL}.allow_tf32 = True", f"{MATMUL}.allow_tf32 = False"], False, True),
    ([f"{CUDNN}.allow_tf32 = False"], False, False),
    ([f"{CUDNN}.allow_tf32 = False", f"{MATMUL}.allow_tf32 = True"], True, False),
    (["torch.set_float32_matmul_precision('high')"], True, True),
    (["torch.set_float32_matmul_precision('medium')"], True, True),
    (["torch.set_float32_matmul_precision('high')", "torch.set_float32_matmul_precision('highest')"], False, True),
    (["torch.backends.fp32_precision = 'tf32'"], True, True),
    (["torch.backends.fp32_precision = 'ieee'"], False, None),
    ([f"{MATMUL}.fp32_precision = 'tf32'"], True, True),
    ([f"{MATMUL}.fp32_precision = 'ieee'"], False, True),
    ([f"{CUDNN}.conv.fp32_precision = 'ieee'"], False, False),
    ([f"{CUDNN}.conv.fp32_precision = 'ieee'", f"{MATMUL}.fp32_precision = 'tf32'"], True, False),
    ([f"{CUDNN}.fp32_precision = 'ieee'"], False, None),
    (["torch.backends.fp32_precision = 'tf32'", f"{MATMUL}.fp32_precision = 'ieee'"], False, True),
    (["torch.backends.fp32_precision = 'tf32'", f"{CUDNN}.conv.fp32_precision = 'ieee'"], True, False),
    # The older and the newer, which torch does not read any more by the older one's name.
    ([f"{MATMUL}.allow_tf32 = True", f"{MATMUL}.fp32_precision = 'ieee'"], False, True),
    ([f"{MATMUL}.fp32_precision = 'tf32'", f"{MATMUL}.allow_tf32 = False"], False, True),
    ([f"{CUDNN}.allow_tf32 = True", f"{CUDNN}.conv.fp32_precision = 'ieee'"], False, False),
    (["torch.set_float32_matmul_precision('high')", f"{MATMUL}.fp32_precision = 'ieee'"], False, True),
    (["torch.backends.fp32_precision = 'tf32'", "torch.set_float32_matmul_precision('highest')"], False, True),
]


def read_after(settings):
    # Where torch's own tests have been imported no setting can be changed any more.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    for setting in settings:
        exec(setting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = math_mode()
        getter = getattr(torch._C, "_get_fp32_precision_getter", None)  # what torch's kernels ask
        theirs = None if getter is None else [getter("cuda", op) == "tf32" for op in ("matmul", "conv")]
    return [bool(found & 1), bool(found & 2)], theirs


@pytest.mark.parametrize(
    "settings, products, convolutions",
    SETTINGS,
    ids=lambda s: "; ".join(s) or "nothing" if isinstance(s, list) else str(s),
)
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_one_setting_is_read(settings, products, convolutions):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(read_after(settings))
        except BaseException as error:
            text = repr(f"{type(error).__name__}: {error}")
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        found = eval(file.read())
    os.waitpid(child, 0)
    assert isinstance(found, tuple), found
    ours, theirs = found
    assert ours[0] == products and ours[1] == (ours[1] if convolutions is None else convolutions)
    assert theirs is None or ours == theirs
