"""Holds the kernels of flash attention, forward and backward. To be imported only where there is Triton.

They compute FusedAttention (csrc/ops/attention/fused_attention.c): softmax(scale q k' + bias, where allowed) v with
dropout in between, of q [B, Q, H, D], k [B, K, G, D], v [B, K, G, W], a block of scores at a time (Dao et al.,
FlashAttention, 2022). Heads h share the keys h // (H // G). Of a row, ``stats`` keeps its largest score and 1 / the
sum of its exponentials. All kernels have one list of arguments; those that one does not read are null.
"""

import triton
import triton.language as tl

from ortmodule.triton_kernels.device_functions import word_of


@triton.jit
def _product(a, b, WIDENS: tl.constexpr):
    """Of blocks, in float32. WIDENS: operands become float32, since the interpreter multiplies bits of bfloat16."""
    if WIDENS:
        made = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        made = tl.dot(a, b, input_precision="ieee")
    return made


@triton.jit
def _scores(
    q, kt, rows, cols, queries, keys, scale, allowed, a_row, a_col, bias, b_row, b_col,
    HAS_ALLOWED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """A block of scores; minus infinity where a key is hidden, or is none."""
    x = _product(q, kt, WIDENS) * scale
    there = (rows[:, None] < queries) & (cols[None, :] < keys)
    if HAS_BIAS:
        x += tl.load(bias + rows[:, None] * b_row + cols[None, :] * b_col, mask=there, other=0).to(tl.float32)
    if IS_CAUSAL:
        there = there & (cols[None, :] <= rows[:, None])
    elif HAS_ALLOWED:
        shown = tl.load(allowed + rows[:, None] * a_row + cols[None, :] * a_col, mask=there, other=0)
        there = there & (shown != 0)
    return tl.where(there, x, float("-inf"))


@triton.jit
def _kept(low, high, key_and_least, head, rows, cols, queries, keys):
    """Which weights a dropout keeps: those that it keeps of [B, H, Q, K]."""
    at = (head.to(tl.int64) * queries + rows[:, None]) * keys + cols[None, :]
    key = (key_and_least.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)
    least = (key_and_least.to(tl.int64) >> 32).to(tl.uint32)
    return word_of(low, high, key, at) >= least


@triton.jit
def _float_of(bits):
    """The float64 of these bits, as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _rows_of(x, rows, step, count, column, WIDTH: tl.constexpr):
    """Rows of a matrix, [rows, columns]; zeros beyond its ends."""
    is_there = (rows[:, None] < count) & (column[None, :] < WIDTH)
    return tl.load(x + rows[:, None] * step + column[None, :], mask=is_there, other=0)


@triton.jit
def _columns_of(x, rows, step, count, column, WIDTH: tl.constexpr):
    """The same as columns, [columns, rows]."""
    is_there = (rows[None, :] < count) & (column[:, None] < WIDTH)
    return tl.load(x + rows[None, :] * step + column[:, None], mask=is_there, other=0)


@triton.jit
def _put_rows(to, rows, step, count, column, WIDTH: tl.constexpr, x):
    """Stores rows of a matrix."""
    is_there = (rows[:, None] < count) & (column[None, :] < WIDTH)
    tl.store(to + rows[:, None] * step + column[None, :], x, mask=is_there)


@triton.jit
def _seed(seed_low, seed_high, seed_at, SEED_THERE: tl.constexpr):
    """The halves of the run's seed, a number or in memory."""
    if SEED_THERE:
        seed = tl.load(seed_at)
        low = seed.to(tl.uint32)
        high = (seed >> 32).to(tl.uint32)
    else:
        low = seed_low.to(tl.uint32)
        high = seed_high.to(tl.uint32)
    return low, high


@triton.jit
def _of_queries(
    q, y, dy, stats, b, h, rows, q_s, y_s, dy_s, heads, queries, d, w, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """What backward reads of rows of a head: q, dy, what ``stats`` keeps, the sum of y dy."""
    is_row = rows < queries
    of_q = _rows_of(q, rows, q_s, queries, d, WIDTH)
    of_y = _rows_of(y, rows, y_s, queries, w, VALUE_WIDTH)
    of_dy = _rows_of(dy, rows, dy_s, queries, w, VALUE_WIDTH)
    at = stats + ((b * queries + rows) * heads + h) * 2
    most = tl.load(at, mask=is_row, other=0)
    inverse = tl.load(at + 1, mask=is_row, other=0)
    return of_q, of_dy, most, inverse, tl.sum(of_y.to(tl.float32) * of_dy.to(tl.float32), 1)


@triton.jit
def _weights_and_slopes(
    of_q, of_dy, kt, vt, most, inverse, delta, head, rows, cols, queries, keys, scale, factor,
    allowed, a_q, a_k, bias, b_q, b_k, low, high, key_and_least,
    HAS_ALLOWED: tl.constexpr, HAS_BIAS: tl.constexpr, IS_CAUSAL: tl.constexpr, DROPS: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """Of a block of scores: the weights behind the dropout, and the scores' gradients."""
    x = _scores(
        of_q, kt, rows, cols, queries, keys, scale, allowed, a_q, a_k, bias, b_q, b_k,
        HAS_ALLOWED, HAS_BIAS, IS_CAUSAL, WIDENS,
    )  # fmt: skip
    p = tl.exp(x - most[:, None]) * inverse[:, None]
    dp = _product(of_dy, vt, WIDENS)
    kept = p
    if DROPS:
        is_kept = _kept(low, high, key_and_least, head, rows, cols, queries, keys)
        kept = tl.where(is_kept, p * factor, 0.0)
        dp = tl.where(is_kept, dp * factor, 0.0)
    return kept, p * (dp - delta[:, None])


@triton.jit
def forward(
    q, k, v, allowed, bias, y, stats, dy, dq, dk, dv, dbias,
    heads, groups, queries, keys, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, dy_b, dy_s, dy_h,
    a_b, a_h, a_q, a_k, b_b, b_h, b_q, b_k, scale, factor, key_and_least, seed_low, seed_high, seed_at,
    BLOCK: tl.constexpr, OTHER: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, IS_SAFE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_STATS: tl.constexpr, SEED_THERE: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """y and stats, for BLOCK queries of a head."""
    blocks = tl.cdiv(queries, BLOCK)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    g = h // (heads // groups)
    factor_ = _float_of(factor)
    scale_ = _float_of(scale)
    low, high = _seed(seed_low, seed_high, seed_at, SEED_THERE)
    rows = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    is_row = rows < queries
    of_q = _rows_of(q + b * q_b + h * q_h, rows, q_s, queries, d, WIDTH)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, W], tl.float32)
    end = keys
    if IS_CAUSAL:
        end = tl.minimum(keys, (block + 1) * BLOCK)
    for start in range(0, end, OTHER):
        cols = start + tl.arange(0, OTHER).to(tl.int64)
        kt = _columns_of(k + b * k_b + g * k_h, cols, k_s, keys, d, WIDTH)
        x = _scores(
            of_q, kt, rows, cols, queries, keys, scale_, allowed + b * a_b + h * a_h, a_q, a_k,
            bias + b * b_b + h * b_h, b_q, b_k, HAS_ALLOWED, HAS_BIAS, IS_CAUSAL, WIDENS,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(x, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp(x - base[:, None])
        less = tl.exp(most - base)
        total = total * less + tl.sum(p, 1)
        if DROPS:
            p = tl.where(_kept(low, high, key_and_least, head, rows, cols, queries,
                               keys), p * factor_, 0.0)  # fmt: skip
        of_v = _rows_of(v + b * v_b + g * v_h, cols, v_s, keys, w, VALUE_WIDTH)
        sums = sums * less[:, None] + _product(p.to(of_v.dtype), of_v, WIDENS)
        most = larger
    inverse = tl.where(
        total == 0.0, 0.0 if IS_SAFE else float("nan"), tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), total)
    )
    made = sums * inverse[:, None]
    _put_rows(y + b * y_b + h * y_h, rows, y_s, queries, w, VALUE_WIDTH, made.to(of_q.dtype))
    if HAS_STATS:
        at = stats + ((b * queries + rows) * heads + h) * 2
        tl.store(at, tl.where(most == float("-inf"), 0.0, most), mask=is_row)
        tl.store(at + 1, inverse, mask=is_row)


@triton.jit
def backward_queries(
    q, k, v, allowed, bias, y, stats, dy, dq, dk, dv, dbias,
    heads, groups, queries, keys, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, dy_b, dy_s, dy_h,
    a_b, a_h, a_q, a_k, b_b, b_h, b_q, b_k, scale, factor, key_and_least, seed_low, seed_high, seed_at,
    BLOCK: tl.constexpr, OTHER: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, IS_SAFE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_STATS: tl.constexpr, SEED_THERE: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """dq [B, Q, H, D] for BLOCK queries of a head; with HAS_STATS the gradient of a bias of the scores' shape, too."""
    blocks = tl.cdiv(queries, BLOCK)
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    g = h // (heads // groups)
    factor_ = _float_of(factor)
    scale_ = _float_of(scale)
    low, high = _seed(seed_low, seed_high, seed_at, SEED_THERE)
    rows = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    is_row = rows < queries
    of_q, of_dy, most, inverse, delta = _of_queries(
        q + b * q_b + h * q_h, y + b * y_b + h * y_h, dy + b * dy_b + h * dy_h, stats, b, h, rows, q_s, y_s, dy_s,
        heads, queries, d, w, WIDTH, VALUE_WIDTH,
    )  # fmt: skip
    sums = tl.zeros([BLOCK, D], tl.float32)
    end = keys
    if IS_CAUSAL and not HAS_STATS:
        end = tl.minimum(keys, (block + 1) * BLOCK)
    for start in range(0, end, OTHER):
        cols = start + tl.arange(0, OTHER).to(tl.int64)
        kt = _columns_of(k + b * k_b + g * k_h, cols, k_s, keys, d, WIDTH)
        vt = _columns_of(v + b * v_b + g * v_h, cols, v_s, keys, w, VALUE_WIDTH)
        _, dx = _weights_and_slopes(
            of_q, of_dy, kt, vt, most, inverse, delta, head, rows, cols, queries, keys, scale_, factor_,
            allowed + b * a_b + h * a_h, a_q, a_k, bias + b * b_b + h * b_h, b_q, b_k, low, high, key_and_least,
            HAS_ALLOWED, HAS_BIAS, IS_CAUSAL, DROPS, WIDENS,
        )  # fmt: skip
        if HAS_STATS:
            tl.store(
                dbias + (head.to(tl.int64) * queries + rows[:, None]) * keys + cols[None, :],
                dx.to(dbias.dtype.element_ty), mask=is_row[:, None] & (cols[None, :] < keys),
            )  # fmt: skip
        sums += _product(dx.to(of_q.dtype), tl.trans(kt), WIDENS)
    made = (sums * scale_).to(of_q.dtype)
    _put_rows(dq + (b * queries * heads + h) * WIDTH, rows, heads * WIDTH, queries, d, WIDTH, made)


@triton.jit
def backward_keys(
    q, k, v, allowed, bias, y, stats, dy, dq, dk, dv, dbias,
    heads, groups, queries, keys, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, y_b, y_s, y_h, dy_b, dy_s, dy_h,
    a_b, a_h, a_q, a_k, b_b, b_h, b_q, b_k, scale, factor, key_and_least, seed_low, seed_high, seed_at,
    BLOCK: tl.constexpr, OTHER: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, IS_SAFE: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_STATS: tl.constexpr, SEED_THERE: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """dk [B, K, G, D] and dv [B, K, G, W] for BLOCK keys of a group of heads, which are added up in order."""
    blocks = tl.cdiv(keys, BLOCK)
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks
    b = (group // groups).to(tl.int64)
    g = (group % groups).to(tl.int64)
    each = heads // groups
    factor_ = _float_of(factor)
    scale_ = _float_of(scale)
    low, high = _seed(seed_low, seed_high, seed_at, SEED_THERE)
    cols = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    w = tl.arange(0, W)
    kt = _columns_of(k + b * k_b + g * k_h, cols, k_s, keys, d, WIDTH)
    vt = _columns_of(v + b * v_b + g * v_h, cols, v_s, keys, w, VALUE_WIDTH)
    of_k = tl.zeros([BLOCK, D], tl.float32)
    of_v = tl.zeros([BLOCK, W], tl.float32)
    begin = 0
    if IS_CAUSAL:
        begin = block * BLOCK // OTHER * OTHER
    for one in range(0, each):
        h = g * each + one
        head = b * heads + h
        for start in range(begin, queries, OTHER):
            rows = start + tl.arange(0, OTHER).to(tl.int64)
            of_q, of_dy, most, inverse, delta = _of_queries(
                q + b * q_b + h * q_h, y + b * y_b + h * y_h, dy + b * dy_b + h * dy_h, stats, b, h, rows,
                q_s, y_s, dy_s, heads, queries, d, w, WIDTH, VALUE_WIDTH,
            )  # fmt: skip
            kept, dx = _weights_and_slopes(
                of_q, of_dy, kt, vt, most, inverse, delta, head, rows, cols, queries, keys, scale_, factor_,
                allowed + b * a_b + h * a_h, a_q, a_k, bias + b * b_b + h * b_h, b_q, b_k, low, high, key_and_least,
                HAS_ALLOWED, HAS_BIAS, IS_CAUSAL, DROPS, WIDENS,
            )  # fmt: skip
            of_v += _product(tl.trans(kept).to(of_dy.dtype), of_dy, WIDENS)
            of_k += _product(tl.trans(dx).to(of_q.dtype), of_q, WIDENS)
    first = b * keys * groups + g
    _put_rows(dk + first * WIDTH, cols, groups * WIDTH, keys, d, WIDTH, (of_k * scale_).to(kt.dtype))
    _put_rows(dv + first * VALUE_WIDTH, cols, groups * VALUE_WIDTH, keys, w, VALUE_WIDTH, of_v.to(vt.dtype))
