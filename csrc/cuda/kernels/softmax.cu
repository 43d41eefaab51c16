/* softmax.cu -- mirrors softmax.c and attention.c: Softmax, LogSoftmax, MaskedSoftmax and their gradients, the
 * first and the third with dropout, too.
 *
 * A block has a row: `length` elements, `inner` apart, of which a thread takes eight neighbours at a time, of four places
 * at once. They are read once for their maximum, once for the sum, and once more for the result, which may take their
 * place; or only once, where a thread has no more: a row of 1024 is a warp's. */
#ifndef T
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct softmax_args {
    const void *a, *b; /* x; or dy and y */
    void *out;
    int64_t rows, length, inner;
    const uint8_t *mask;             /* NULL: everything is allowed */
    int64_t dim[8], step[8], column; /* of the mask: the rows' dimensions and its strides along them; along a row */
    int32_t rank;
    /* Of dropout. */
    uint32_t key, threshold;
    int32_t safe;            /* a row of nothing but -inf is zeros */
    void *dropped;           /* or NULL; then `out` may be */
    const uint64_t *seed_at; /* or NULL */
    uint64_t seed;
    double factor;
} softmax_args;

#ifdef ORT_HOST
#include "ops/pointwise/dropout.h"

kernel_fn softmax_cuda, log_softmax_cuda, softmax_grad_cuda, log_softmax_grad_cuda, masked_softmax_cuda,
    softmax_dropout_cuda, softmax_dropout_grad_cuda, masked_softmax_dropout_cuda;

static status run(ctx *c, const call *k, kernel kernels[DTYPE_COUNT]) {
    const shape *s = &k->in[0].shape;
    softmax_args a = {.a = k->in[0].data, .b = k->n_in > 1 ? k->in[1].data : NULL, .out = k->out[0].data};
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), s->rank, &axis));
    if (shape_count(s) == 0) return OK;
    a.length = s->rank ? s->dim[axis] : 1;
    a.inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    a.rows = shape_count(s) / a.length;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_kept(a.rows, a.length, k->in[0].type), &a);
}

#define ALONG_AXIS(name)                                                                                               \
    status name##_cuda(ctx *c, const call *k) {                                                                        \
        static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(name);                                                      \
        return run(c, k, kernels);                                                                                     \
    }
ALONG_AXIS(softmax)
ALONG_AXIS(log_softmax)
ALONG_AXIS(softmax_grad)
ALONG_AXIS(log_softmax_grad)

/* Along the last axis of an operand that has elements. */
static softmax_args along_last(const call *k) {
    const tensor *x = &k->in[0];
    const int64_t length = x->shape.dim[x->shape.rank - 1];
    return (softmax_args){
        .a = x->data, .out = k->out[0].data, .inner = 1, .length = length, .rows = tensor_count(x) / length};
}

static void add_mask(const call *k, softmax_args *a) {
    const shape *s = &k->in[0].shape;

    if (k->n_in < 2 || !tensor_present(&k->in[1])) return;
    const tensor mask = tensor_expand(&k->in[1], s);
    a->rank = s->rank - 1;
    a->mask = mask.data;
    a->column = mask.stride[a->rank];
    for (int d = 0; d < a->rank; d++) {
        a->dim[d] = s->dim[d];
        a->step[d] = mask.stride[d];
    }
}

static void add_dropout(const call *k, softmax_args *a) {
    const dropout_run d = dropout_of(k);

    a->key = d.key;
    a->threshold = d.threshold;
    a->factor = d.factor;
    a->seed = k->seed;
    a->seed_at = k->cuda->seed;
}

static status start(ctx *c, const call *k, kernel kernels[DTYPE_COUNT], const softmax_args *a) {
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_kept(a->rows, a->length, k->in[0].type), a);
}

status masked_softmax_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(masked_softmax);

    if (tensor_count(&k->in[0]) == 0) return OK;
    softmax_args a = along_last(k);
    add_mask(k, &a);
    return start(c, k, kernels, &a);
}

static status softmax_dropout(ctx *c, const call *k, bool safe) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(softmax_dropout);

    if (tensor_count(&k->in[0]) == 0) return OK;
    softmax_args a = along_last(k);
    add_mask(k, &a);
    add_dropout(k, &a);
    a.dropped = a.out;
    a.out = k->n_out > 1 ? k->out[1].data : NULL;
    a.safe = safe;
    return start(c, k, kernels, &a);
}

status softmax_dropout_cuda(ctx *c, const call *k) { return softmax_dropout(c, k, false); }
status masked_softmax_dropout_cuda(ctx *c, const call *k) { return softmax_dropout(c, k, true); }

status softmax_dropout_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(softmax_dropout_grad);

    if (tensor_count(&k->in[0]) == 0) return OK;
    softmax_args a = along_last(k);
    add_dropout(k, &a);
    a.b = k->in[1].data;
    return start(c, k, kernels, &a);
}
#endif

#ifdef ORT_DEVICE
#include "cuda/kernels/philox.h"

/* Where a row begins. */
DEVICE int64_t start_of(const softmax_args *a, int64_t row) {
    return quotient(row, a->inner) * a->length * a->inner + remainder_of(row, a->inner);
}

DEVICE int64_t mask_of(const softmax_args *a, int64_t row) {
    int64_t offset = 0;
    for (int d = a->rank - 1; d >= 0; d--) {
        const int64_t next = quotient(row, a->dim[d]);
        offset += (row - next * a->dim[d]) * a->step[d];
        row = next;
    }
    return offset;
}

/* The elements of a row as pieces: [begin, begin + length), of the tensor where they lie together, else of the row. */
DEVICE int64_t begin_of(const softmax_args *a, int64_t row) { return a->inner == 1 ? row * a->length : 0; }

/* Of elements i + j of `count` pieces of a row, PIECE_STEP apart, those that are there; bit AT_ONCE * k + j. */
DEVICE uint32_t there_of(int64_t length, int64_t i, int count) {
    uint32_t there = 0;
    UNROLL for (int k = 0; k < count; k++) there |= inside_of(i + k * PIECE_STEP, 0, length) << AT_ONCE * k;
    return there;
}

/* Of those that are there the ones that are allowed. */
DEVICE uint32_t allowed_of(const softmax_args *a, const uint8_t *mask, int64_t i, uint32_t there, int count) {
    enum { MOST_PIECES = PIECES_OF(F32), WORDS = AT_ONCE / 4 };
    uint32_t words[MOST_PIECES][MOST_WORDS] = {{0}}, allowed = 0;

    if (!mask) return there;
    if (a->column == 1 && ((i | a->length) & (AT_ONCE - 1)) == 0 && IS_ALIGNED(mask, U8)) {
        UNROLL for (int k = 0; k < count; k++) if (there >> AT_ONCE * k & 1)
            read_words(mask, U8, i + k * PIECE_STEP, words[k]);
        UNROLL for (int k = 0; k < count; k++) {
            UNROLL for (int j = 0; j < AT_ONCE; j++) allowed |= (uint32_t)(word_part(words[k], 1, j) != 0)
                                                                << (AT_ONCE * k + j);
        }
        return allowed;
    }
    UNROLL for (int k = 0; k < count; k++) {
        UNROLL for (int j = 0; j < AT_ONCE; j++) {
            const int bit = AT_ONCE * k + j;
            if (there >> bit & 1) allowed |= (uint32_t)(mask[(i + k * PIECE_STEP + j) * a->column] != 0) << bit;
        }
    }
    return allowed;
}

#define EACH PIECES_OF(TYPE)
/* Element j of piece k, for every one that is there. */
#define EACH_THERE(k, j, there)                                                                                        \
    UNROLL for (int k = 0; k < EACH; k++) UNROLL for (int j = 0; j < AT_ONCE; j++) if ((there) >> (AT_ONCE * k + j) & 1)
#define EACH_PIECE(k, j) UNROLL for (int k = 0; k < EACH; k++) UNROLL for (int j = 0; j < AT_ONCE; j++)

#define TEMPLATE "cuda/kernels/softmax.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

/* Elements i + j of pieces of a row, from `begin` on; those outside are 0, or stay. */
DEVICE void NAME(take)(const softmax_args *a, const void *p, int64_t row, int64_t i, int64_t begin,
                       A x[EACH][AT_ONCE]) {
    const int64_t start = start_of(a, row) - begin * a->inner, end = begin + a->length;

    if (a->inner == 1) {
        TAKE_PIECES(p, TYPE, i, PIECE_STEP, begin, end, x);
        return;
    }
    EACH_PIECE(k, j) {
        const int64_t at = i + k * PIECE_STEP + j;
        x[k][j] = at >= begin && at < end ? GET(((const T *)p)[start + at * a->inner]) : 0;
    }
}
DEVICE void NAME(give)(const softmax_args *a, void *p, int64_t row, int64_t i, int64_t begin, A x[EACH][AT_ONCE]) {
    const int64_t start = start_of(a, row) - begin * a->inner, end = begin + a->length;

    if (a->inner == 1) {
        UNROLL for (int k = 0; k < EACH; k++) GIVE(p, TYPE, i + k * PIECE_STEP, begin, end, x[k]);
        return;
    }
    EACH_PIECE(k, j) {
        const int64_t at = i + k * PIECE_STEP + j;
        if (at >= begin && at < end) ((T *)p)[start + at * a->inner] = PUT(x[k][j]);
    }
}

/* As NAME(take) of x, with -inf in the place of what is outside or not allowed. */
DEVICE void NAME(take_allowed)(const softmax_args *a, int64_t row, int64_t i, int64_t begin, A x[EACH][AT_ONCE]) {
    const uint32_t there = there_of(a->length, i - begin, EACH);
    const uint32_t allowed = allowed_of(a, a->mask ? a->mask + mask_of(a, row) : 0, i - begin, there, EACH);

    NAME(take)(a, a->a, row, i, begin, x);
    EACH_PIECE(k, j) x[k][j] = allowed >> (AT_ONCE * k + j) & 1 ? x[k][j] : -(A)INFINITY;
}

/* The elements that a dropout keeps, as there_of; by the whole warp. */
DEVICE uint32_t NAME(kept)(const softmax_args *a, int64_t i, int64_t end) {
    const uint64_t seed = a->seed_at ? *a->seed_at : a->seed;
    uint32_t kept = 0;

    UNROLL for (int k = 0; k < EACH; k++) {
        const int64_t at = i + k * PIECE_STEP;
        if (at - threadIdx.x % WARP * AT_ONCE >= end) break; /* the whole warp's is behind the row */
        kept |= kept_bits(seed, a->key, a->threshold, at) << AT_ONCE * k;
    }
    return kept;
}

/* Safe: nothing allowed, or nothing but -inf, is zeros. The result before dropout is written where backward wants it;
 * results of narrow types are dropped as they are stored. */
DEVICE void NAME(softmax_row)(const softmax_args *a, int64_t row, int safe, int drops) {
    const int64_t begin = begin_of(a, row), end = begin + a->length;
    const int many = ARE_ROUNDS(TYPE, begin, end);
    A most = -(A)INFINITY, total = 0, x[EACH][AT_ONCE] = {{0}};

    NOT_UNROLLED for (int pass = 0; pass < 3; pass++) {
        FOR_ROUNDS(TYPE, i, begin, end) {
            if (pass == 0 || many) NAME(take_allowed)(a, row, i, begin, x);
            if (pass == 0) {
                EACH_PIECE(k, j) most = x[k][j] > most ? x[k][j] : most;
                continue;
            }
            if (pass == 1 || many) {
                EACH_PIECE(k, j) x[k][j] = EXP(x[k][j] - most); /* outside 0 */
            }
            if (pass == 1) {
                EACH_PIECE(k, j) total += x[k][j];
                continue;
            }
            EACH_PIECE(k, j) x[k][j] /= total;
            if (a->out) NAME(give)(a, a->out, row, i, begin, x);
            if (drops) {
                const uint32_t kept = NAME(kept)(a, i, end);
                EACH_PIECE(k, j) x[k][j] = GET(PUT(x[k][j])) * (kept >> (AT_ONCE * k + j) & 1 ? (A)a->factor : 0);
                NAME(give)(a, a->dropped, row, i, begin, x);
            }
        }
        if (pass == 0) {
            most = MOST(most);
            if (safe && most == -(A)INFINITY) most = 0;
        } else if (pass == 1) {
            total = SUM(total);
            if (safe && total == 0) total = 1;
        }
    }
}

KERNEL(NAME(softmax), softmax_args) { FOR_BLOCKS(row, a.rows) NAME(softmax_row)(&a, row, 0, 0); }
KERNEL(NAME(masked_softmax), softmax_args) { FOR_BLOCKS(row, a.rows) NAME(softmax_row)(&a, row, 1, 0); }
KERNEL(NAME(softmax_dropout), softmax_args) { FOR_BLOCKS(row, a.rows) NAME(softmax_row)(&a, row, a.safe, 1); }

KERNEL(NAME(log_softmax), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const int64_t begin = begin_of(&a, row), end = begin + a.length;
        const int many = ARE_ROUNDS(TYPE, begin, end);
        A most = -(A)INFINITY, total = 0, x[EACH][AT_ONCE] = {{0}};

        NOT_UNROLLED for (int pass = 0; pass < 3; pass++) {
            FOR_ROUNDS(TYPE, i, begin, end) {
                const uint32_t there = there_of(a.length, i - begin, EACH);
                if (pass == 0 || many) NAME(take)(&a, a.a, row, i, begin, x);
                if (pass == 0) {
                    EACH_THERE(k, j, there) most = x[k][j] > most ? x[k][j] : most;
                } else if (pass == 1) {
                    EACH_THERE(k, j, there) total += EXP(x[k][j] - most);
                } else {
                    EACH_PIECE(k, j) x[k][j] = x[k][j] - most - total;
                    NAME(give)(&a, a.out, row, i, begin, x);
                }
            }
            if (pass == 0) most = MOST(most);
            else if (pass == 1) total = LOG(SUM(total));
        }
    }
}

/* dy, of which a dropout may have left some, as it would have been stored. */
DEVICE void NAME(take_dy)(const softmax_args *a, int64_t row, int64_t i, int64_t begin, int drops,
                          A dy[EACH][AT_ONCE]) {
    NAME(take)(a, a->a, row, i, begin, dy);
    if (!drops) return;
    const uint32_t kept = NAME(kept)(a, i, begin + a->length);
    EACH_PIECE(k, j) dy[k][j] = GET(PUT(dy[k][j] * (kept >> (AT_ONCE * k + j) & 1 ? (A)a->factor : 0)));
}

DEVICE void NAME(softmax_grad_row)(const softmax_args *a, int64_t row, int drops) {
    const int64_t begin = begin_of(a, row), end = begin + a->length;
    const int many = ARE_ROUNDS(TYPE, begin, end);
    A dot = 0, dy[EACH][AT_ONCE] = {{0}}, y[EACH][AT_ONCE] = {{0}};

    NOT_UNROLLED for (int pass = 0; pass < 2; pass++) {
        FOR_ROUNDS(TYPE, i, begin, end) {
            if (pass == 0 || many) {
                NAME(take_dy)(a, row, i, begin, drops, dy);
                NAME(take)(a, a->b, row, i, begin, y);
            }
            if (pass == 0) { /* outside both are 0 */
                EACH_PIECE(k, j) dot += dy[k][j] * y[k][j];
            } else {
                EACH_PIECE(k, j) dy[k][j] = y[k][j] * (dy[k][j] - dot);
                NAME(give)(a, a->out, row, i, begin, dy);
            }
        }
        if (pass == 0) dot = SUM(dot);
    }
}

KERNEL(NAME(softmax_grad), softmax_args) { FOR_BLOCKS(row, a.rows) NAME(softmax_grad_row)(&a, row, 0); }
KERNEL(NAME(softmax_dropout_grad), softmax_args) { FOR_BLOCKS(row, a.rows) NAME(softmax_grad_row)(&a, row, 1); }

KERNEL(NAME(log_softmax_grad), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const int64_t begin = begin_of(&a, row), end = begin + a.length;
        const int many = ARE_ROUNDS(TYPE, begin, end);
        A total = 0, dy[EACH][AT_ONCE] = {{0}}, y[EACH][AT_ONCE];

        NOT_UNROLLED for (int pass = 0; pass < 2; pass++) {
            FOR_ROUNDS(TYPE, i, begin, end) {
                if (pass == 0 || many) NAME(take)(&a, a.a, row, i, begin, dy);
                if (pass == 0) {
                    EACH_PIECE(k, j) total += dy[k][j];
                } else {
                    NAME(take)(&a, a.b, row, i, begin, y);
                    EACH_PIECE(k, j) dy[k][j] -= EXP(y[k][j]) * total;
                    NAME(give)(&a, a.out, row, i, begin, dy);
                }
            }
            if (pass == 0) total = SUM(total);
        }
    }
}
#endif
