"""How far results may be from PyTorch's, by type: |found - expected| <= relative * |expected| + absolute.

The 16-bit types allow a few roundings: gradients pass through several nodes.
"""

import os

import torch

#: A sanitized build has no fused multiply-add: its sums are a little less exact.
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

#: Of one operator.
OPERATOR = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}
#: Of a function of PyTorch, which may be many operators; the absolute part is a share of the tensor's largest element,
#: or of 1 if that is less.
FUNCTION = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (2e-4, 2e-5),
    torch.bfloat16: (4e-2, 2e-2),
    torch.float16: (5e-3, 3e-3),
}
