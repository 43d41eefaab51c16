"""Holds functions that Triton kernels call. To be imported only where there is Triton."""

import triton
import triton.language as tl


@triton.jit
def word_of(low, high, key, at):
    """The engine's random word (csrc/core/philox.c) of an element by its place; low, high: halves of the seed."""
    at = at.to(tl.int64)
    place = at % 16
    counter = at // 64 * 16 + place // 2 + 8 * (place % 2)
    x = (counter & 0xFFFFFFFF).to(tl.uint32)
    y = (counter >> 32).to(tl.uint32)
    z = key + tl.zeros_like(x)
    w = tl.zeros_like(x)
    k = low
    m = high
    for _ in tl.static_range(10):
        p = x.to(tl.uint64) * 0xD2511F53
        q = z.to(tl.uint64) * 0xCD9E8D57
        x = (q >> 32).to(tl.uint32) ^ y ^ k
        y = q.to(tl.uint32)
        z = (p >> 32).to(tl.uint32) ^ w ^ m
        w = p.to(tl.uint32)
        k = (k.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        m = (m.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    which = at % 64 // 16
    return tl.where(which == 0, x, tl.where(which == 1, y, tl.where(which == 2, z, w)))
