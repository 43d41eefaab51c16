/* test_pointwise.c -- compares the pointwise loop with elements computed one by one. Shapes are random; broadcasting,
 * strides of both signs, all types, results written over operands. */
#include "ops/op.h"

#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TRIALS = 4000, MOST_ELEMENTS = 20000, MOST_OPERANDS = 4, FENCE = 64 };

static int below(int n) { return rand() % n; }

/* --- random operands ---------------------------------------------------------------------------------------------- */

static shape random_shape(void) {
    static const int sizes[] = {1, 2, 3, 5, 7, 16, 64, 130, 700, 1500};
    shape s = {.rank = below(6)};
    int64_t count = 1;

    for (int d = 0; d < s.rank; d++) {
        do s.dim[d] = sizes[below(10)];
        while (count * s.dim[d] > MOST_ELEMENTS);
        count *= s.dim[d];
    }
    return s;
}

/* A shape that broadcasts to `s`. */
static shape random_part(const shape *s) {
    int dropped = below(3) == 0 ? below(s->rank + 1) : 0;
    shape part = {.rank = s->rank - dropped};

    for (int d = 0; d < part.rank; d++) part.dim[d] = below(3) == 0 ? 1 : s->dim[d + dropped];
    return part;
}

/* Dimensions in any order in memory, with gaps, some backwards; small numbers. `*memory` is to be freed. */
static tensor random_tensor(dtype type, const shape *s, void **memory) {
    tensor t = {.type = type, .shape = *s};
    int order[MAX_RANK];
    int64_t size = 1, first = 0;

    for (int d = 0; d < s->rank; d++) order[d] = d;
    for (int d = s->rank - 1; d > 0 && below(2); d--) {
        int other = below(d + 1), kept = order[d];
        order[d] = order[other];
        order[other] = kept;
    }
    for (int i = s->rank - 1; i >= 0; i--) {
        int d = order[i];
        size *= below(4) ? 1 : 1 + below(3);
        t.stride[d] = below(8) ? size : -size;
        if (t.stride[d] < 0) first += size * (s->dim[d] - 1);
        size *= s->dim[d];
    }
    *memory = calloc((size_t)size, dtype_size(type));
    for (int64_t i = 0; *memory && i < size; i++) {
        if (type == BOOL) dtype_set_int(type, *memory, i, below(2));
        else if (dtype_is_float(type)) dtype_set_value(type, *memory, i, (below(41) - 20) / 4.0);
        else dtype_set_int(type, *memory, i, below(9) - (type == U8 ? 0 : 4));
    }
    t.data = (char *)*memory + first * (int64_t)dtype_size(type);
    return t;
}

static double element(const tensor *t, int64_t i) {
    int64_t at = 0;
    for (int d = t->shape.rank - 1; d >= 0; d--) {
        at += i % t->shape.dim[d] * t->stride[d];
        i /= t->shape.dim[d];
    }
    return dtype_get(t->type, t->data, at);
}

/* --- operators ---------------------------------------------------------------------------------------------------- */

typedef double formula(const double *x);

static double add(const double *x) { return x[0] + x[1]; }
static double mul(const double *x) { return x[0] * x[1]; }
static double maximum(const double *x) { return x[0] > x[1] ? x[0] : x[1]; }
static double less(const double *x) { return x[0] < x[1]; }
static double where(const double *x) { return x[0] != 0 ? x[1] : x[2]; }
static double clamp(const double *x) { return fmin(fmax(x[0], x[1]), x[2]); }
static double negative(const double *x) { return -x[0]; }
static double same(const double *x) { return x[0]; }
static double clamp_grad(const double *x) { return x[1] >= x[2] && x[1] <= x[3] ? x[0] : 0; }

typedef struct subject {
    const char *op;
    int operands;
    formula *expected;
    dtype_set types;
} subject;

static const subject subjects[] = {
    {"Add", 2, add, NUMBERS},      {"Mul", 2, mul, NUMBERS},      {"Maximum", 2, maximum, NUMBERS},
    {"Less", 2, less, NUMBERS},    {"Where", 3, where, ANY_TYPE}, {"Clamp", 3, clamp, NUMBERS},
    {"Neg", 1, negative, NUMBERS}, {"Cast", 1, same, ANY_TYPE},   {"ClampGrad", 4, clamp_grad, FLOATS},
};

typedef struct trial {
    const subject *subject;
    tensor in[MOST_OPERANDS], out;
    void *memory[MOST_OPERANDS + 1];
    double *expected;
} trial;

static dtype random_type(dtype_set set) {
    for (;;) {
        dtype t = (dtype)(1 + below(DTYPE_COUNT - 1));
        if (set & SET(t)) return t;
    }
}

/* Converted as a store does it: integers keep their low bits. */
static double stored(dtype t, double x) {
    int64_t word = 0;
    if (dtype_is_float(t) || t == BOOL) dtype_set_value(t, &word, 0, x);
    else dtype_set_int(t, &word, 0, (int64_t)x);
    return dtype_get(t, &word, 0);
}

static void begin(trial *r) {
    const subject *u = &subjects[below(sizeof subjects / sizeof *subjects)];
    dtype type = random_type(u->types), to = u->expected == less   ? BOOL
                                             : u->expected == same ? random_type(ANY_TYPE)
                                                                   : type;
    shape s = random_shape();
    int64_t count = shape_count(&s);
    size_t bytes = (size_t)count * dtype_size(to);

    *r = (trial){.subject = u, .out = {.type = to, .shape = s}};
    for (int i = 0; i < u->operands; i++) {
        bool whole = i == 0 && (u->operands == 1 || u->expected == clamp || u->expected == clamp_grad);
        shape part = whole ? s : random_part(&s);
        r->in[i] = random_tensor(u->expected == where && i == 0 ? BOOL : type, &part, &r->memory[i]);
        if (below(4) == 0) r->in[i] = tensor_expand(&r->in[i], &s);
    }
    stride_contiguous(&s, r->out.stride);
    r->memory[MOST_OPERANDS] = memset(malloc(bytes + 2 * FENCE), 0xAB, bytes + 2 * FENCE);
    r->out.data = (char *)r->memory[MOST_OPERANDS] + FENCE;
    r->expected = calloc((size_t)count, sizeof *r->expected);
    for (int64_t i = 0; i < count; i++) {
        double x[MOST_OPERANDS];
        for (int k = 0; k < u->operands; k++) {
            tensor e = tensor_expand(&r->in[k], &s);
            x[k] = element(&e, i);
        }
        r->expected[i] = stored(to, u->expected(x));
    }
}

/* Operand i moves into the memory of the result. */
static void overlay(trial *r, int i) {
    tensor *t = &r->in[i], whole = {.data = r->out.data, .type = t->type, .shape = t->shape};

    if (t->type != r->out.type || !shape_equal(&t->shape, &r->out.shape)) return;
    for (int64_t k = 0; k < tensor_count(t); k++) dtype_set_value(t->type, whole.data, k, element(t, k));
    stride_contiguous(&whole.shape, whole.stride);
    *t = whole;
}

static bool finish(trial *r) {
    const attr attrs[] = {INT("to", dtype_table[r->out.type].onnx), {0}};
    node n = {.op = op_find(NULL, r->subject->op, 0), .attrs = attrs};
    call k = {.node = &n, .in = r->in, .out = &r->out, .n_in = r->subject->operands, .n_out = 1};
    const unsigned char *before = r->memory[MOST_OPERANDS];
    const unsigned char *after = before + FENCE + (size_t)tensor_count(&r->out) * dtype_size(r->out.type);
    bool right;
    ctx c;

    ctx_init(&c);
    right = n.op && n.op->cpu(&c, &k) == OK;
    ctx_release(&c);
    for (int64_t i = 0; i < tensor_count(&r->out); i++)
        right &= dtype_get(r->out.type, r->out.data, i) == r->expected[i];
    for (int i = 0; i < FENCE; i++) right &= before[i] == 0xAB && after[i] == 0xAB;
    for (int i = 0; i <= MOST_OPERANDS; i++) free(r->memory[i]);
    free(r->expected);
    return right;
}

TEST(pointwise_operators_read_any_strides) {
    int wrong = 0;

    for (int i = 0; i < TRIALS; i++) {
        trial r;
        begin(&r);
        wrong += !finish(&r);
    }
    CHECK(wrong == 0);
}

TEST(pointwise_operators_write_over_their_operands) {
    int wrong = 0;

    for (int i = 0; i < TRIALS; i++) {
        trial r;
        begin(&r);
        if (r.subject->expected == add || r.subject->expected == maximum) overlay(&r, below(2));
        else if (r.subject->expected == where) overlay(&r, 1);
        else if (r.subject->expected == negative || r.subject->expected == clamp) overlay(&r, 0);
        wrong += !finish(&r);
    }
    CHECK(wrong == 0);
}
