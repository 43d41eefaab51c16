"""Says what the engine sees of this CPU: less than PyTorch in a build that is capped (tests/cap.c)."""

from pathlib import Path

import torch

from ortmodule import _core

#: The clones of kernels that are chosen in build/avx2 and build/baseline.
CLONES = {"avx2": "arch_x86_64_v3", "baseline": "default"}
BUILD = Path(_core.__file__).parents[1].name
IS_CAPPED = BUILD in CLONES

HAS_AVX512_BF16 = torch.cpu._is_avx512_bf16_supported() and not IS_CAPPED
HAS_AMX = torch.cpu._is_amx_tile_supported() and not IS_CAPPED
