/* test_attention_rows.c -- tests that FusedAttention over some rows is what it is over all of them, dropout included.
 * Memory is of the exact size, so that sanitizers see every step beyond it. */
#include "build.h"
#include "test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2, S = 300, H = 4, G = 2, D = 5, W = 3 }; /* more keys than a tile has */
enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, Y, STATS, DY, OPERANDS };
enum { RESULTS = 3 };

static unsigned state;
static double random_number(void) {
    state = state * 1664525u + 1013904223u;
    return (double)(state >> 8) * 0x1p-24 - 0.5;
}

static tensor made(dtype type, shape s) {
    tensor t = {.type = type, .shape = s, .data = malloc((size_t)shape_count(&s) * dtype_size(type))};
    stride_contiguous(&s, t.stride);
    if (!t.data) abort();
    memset(t.data, 0xff, (size_t)shape_count(&s) * dtype_size(type)); /* NaN: all has to be written */
    return t;
}

static tensor filled(dtype type, shape s) {
    tensor t = made(type, s);
    for (int64_t i = 0; i < shape_count(&s); i++) dtype_set_value(type, t.data, i, random_number());
    return t;
}

/* `rows` of [B * S, ..]; the others of `all` become zeros. Repetitions hold what no kernel may use. */
static tensor packed(tensor *all, const int64_t *rows, int count) {
    const int64_t width = shape_span(&all->shape, 2, 4);
    tensor t = made(all->type, SHAPE(count, all->shape.dim[2], all->shape.dim[3]));
    const size_t bytes = (size_t)width * dtype_size(all->type);

    for (int i = 0; i < count; i++) {
        const int64_t row = rows[i] < 0 ? -1 - rows[i] : rows[i];
        memcpy((char *)t.data + (size_t)i * bytes, (char *)all->data + (size_t)row * bytes, bytes);
    }
    for (int64_t row = 0, i = 0; row < B * S; row++) {
        if (i < count && rows[i] == row) i++;
        else memset((char *)all->data + (size_t)row * bytes, 0, bytes);
    }
    return t;
}

static void run(const char *name, int n_in, tensor *in, int n_out, tensor *out) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *operands[OPERANDS] = {NULL}, *y[RESULTS];

    for (int i = 0; i < n_in; i++)
        if (tensor_present(&in[i])) must(&c, graph_add_input(g, NULL, in[i].type, &in[i].shape, &operands[i]));
    must(&c, graph_emit(g, name,
                        NODE_ATTRS(FLOAT("scale", 0.7), FLOAT("ratio", 0.3), INT("key", 5), INT("batch", B),
                                   INT("queries", S), INT("keys", S)),
                        n_in, operands, n_out, y));
    for (int i = 0; i < n_out; i++) out[i] = made(y[i]->type, y[i]->shape);
    const node *n = y[0]->def;
    void *work = n->op->workspace && n->op->workspace(n) ? malloc(n->op->workspace(n)) : NULL;
    CHECK_OK(&c,
             n->op->cpu(
                 &c, &(call){.node = n, .in = in, .out = out, .n_in = n_in, .n_out = n_out, .work = work, .seed = 11}));
    free(work);
    ctx_release(&c);
}

static double worst(const tensor *some, const tensor *all, const int64_t *rows) {
    const int64_t width = shape_span(&some->shape, 1, 3);
    double off = 0, size = 1e-9;

    for (int64_t i = 0; i < some->shape.dim[0] * width; i++) {
        const int64_t row = rows[i / width];
        const double x = dtype_get(some->type, some->data, i);
        const double y = row < 0 ? 0 : dtype_get(all->type, all->data, row * width + i % width);
        if (!isfinite(x)) return INFINITY;
        off = fmax(off, fabs(x - y));
        size = fmax(size, fabs(y));
    }
    return off / size;
}

static void check(dtype type, double tolerance) {
    int64_t rows[B * S];
    bool live[B * S];
    int count = 0;
    tensor all[OPERANDS] = {{0}}, some[OPERANDS], y[2][2], dx[2][RESULTS];

    state = 3;
    for (int i = 0; i < B * S; i++) {
        live[i] = random_number() > (i < S ? -0.2 : 0.3); /* holes, more of them in the second sequence */
        if (live[i]) rows[count++] = i;
    }
    for (int i = 0; i < 5; i++, count++) rows[count] = -1 - rows[count - 1 - i];
    all[Q] = filled(type, SHAPE(B, S, H, D));
    all[K] = filled(type, SHAPE(B, S, G, D));
    all[V] = filled(type, SHAPE(B, S, G, W));
    all[DY] = filled(type, SHAPE(B, S, H, W));
    all[BIAS] = filled(type, SHAPE(1, H, S, S));
    all[ALLOWED] = made(BOOL, SHAPE(B, 1, S, S));
    for (int i = 0; i < B * S * S; i++) /* causal, and a window */
        ((uint8_t *)all[ALLOWED].data)[i] =
            live[i / (S * S) * S + i % S] && i % S <= i / S % S && i % S + 200 > i / S % S;
    memcpy(some, all, sizeof all);
    for (int i = 0; i < 4; i++) {
        const int operand = (const int[]){Q, K, V, DY}[i];
        some[operand] = packed(&all[operand], rows, count);
    }
    some[Q_ROWS] = some[K_ROWS] = made(I64, SHAPE(count));
    memcpy(some[Q_ROWS].data, rows, (size_t)count * sizeof *rows);
    for (int i = 0; i < 2; i++) {
        tensor *in = i ? all : some;
        run("FusedAttention", i ? BIAS + 1 : K_ROWS + 1, in, 2, y[i]);
        in[Y] = y[i][0];
        in[STATS] = y[i][1];
        run("FusedAttentionGrad", OPERANDS, in, RESULTS, dx[i]);
    }
    CHECK(worst(&y[0][0], &y[1][0], rows) <= tolerance);
    for (int i = 0; i < RESULTS; i++) CHECK(worst(&dx[0][i], &dx[1][i], rows) <= tolerance);

    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 2; k++) free(y[i][k].data);
        for (int k = 0; k < RESULTS; k++) free(dx[i][k].data);
    }
    for (int i = 0; i < 4; i++) {
        const int operand = (const int[]){Q, K, V, DY}[i];
        free(all[operand].data);
        free(some[operand].data);
    }
    free(some[Q_ROWS].data);
    free(all[ALLOWED].data);
    free(all[BIAS].data);
}

TEST(attention_over_some_rows_is_that_over_all) {
    check(F64, 1e-13);
    check(F32, 1e-5);
    check(BF16, 2e-2);
    check(F16, 3e-3);
}
