/* embedding_norm.c -- owns EmbeddingNorm, what passes/embedding_norm.c makes of a LayerNormalization of sums of rows:
 *
 *     s[r] = a[i[r]] + b[j[r]] + ...,   y[r] = LayerNormalization(s[r])
 *
 * Operands are scale, bias, then a table and an index of each addend; a table without an index gives its rows in order.
 * Bit t of from_end: do indices of addend t count from the end where they are negative?
 * Where there are fewer rows of one than of the result they are repeated. Nothing of this is stored but y and, where
 * backward wants it, s. Bits are those of the operators one by one. */
#include "core/parallel.h"
#include "ops/movement/move.h"
#include "ops/norms/norm.h"
#include "ops/queries.h"

#include <math.h>

enum { Y, MEANS, INVERSES, SUM_OUT };

/* --- kernel ------------------------------------------------------------------------------------------------------- */

typedef struct job {
    const void *table[EMBEDDING_TABLES];
    const tensor *index[EMBEDDING_TABLES]; /* NULL: rows in order */
    int64_t size[EMBEDDING_TABLES],
        count[EMBEDDING_TABLES]; /* rows of the table; those that are added, again and again */
    int tables;
    int64_t width;
    double epsilon;
    const void *scale, *bias;
    void *out, *sum, *means, *inverses; /* of the last three any may be NULL */
    void (*fn)(const struct job *j, int64_t begin, int64_t end);
} job;

static inline int64_t row_of(const job *j, int t, int64_t row) {
    const int64_t at = row % j->count[t];
    return j->index[t] ? wrap_index(index_at(j->index[t], at), j->size[t]) : at;
}

#define TEMPLATE "ops/norms/embedding_norm_rows.h"
#include "ops/pointwise/each_float.h"

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    j->fn(j, begin, end);
}

static void *memory(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]) ? k->out[i].data : NULL; }

static status embedding_norm_cpu(ctx *c, const call *k) {
    static void (*const rows[DTYPE_COUNT])(const job *, int64_t, int64_t) = FLOAT_TABLE(embedding_rows);
    const tensor *y = &k->out[Y];
    const dtype computed = norm_computed_in(y->type);
    job j = {.tables = (k->n_in - EMBEDDING_ADDENDS + 1) / 2, /* the last one's index may be left out */
             .width = y->shape.dim[y->shape.rank - 1],
             .epsilon = node_float(k->node, "epsilon"),
             .scale = norm_as_computed(&k->in[EMBEDDING_SCALE], computed, k->work),
             .out = y->data,
             .means = memory(k, MEANS),
             .inverses = memory(k, INVERSES),
             .sum = memory(k, SUM_OUT),
             .fn = rows[y->type]};

    j.bias =
        norm_as_computed(&k->in[EMBEDDING_BIAS], computed, (char *)k->work + (size_t)j.width * dtype_size(computed));
    for (int t = 0; t < j.tables; t++) {
        const tensor *table = &k->in[EMBEDDING_ADDENDS + 2 * t];
        const tensor *index = EMBEDDING_ADDENDS + 2 * t + 1 < k->n_in ? table + 1 : NULL;
        j.table[t] = table->data;
        j.size[t] = j.count[t] = shape_span(&table->shape, 0, table->shape.rank - 1);
        if (!index || !tensor_present(index)) continue;
        TRY(check_indices(c, index, node_int(k->node, "from_end") >> t & 1 ? -j.size[t] : 0, j.size[t]));
        j.index[t] = index;
        j.count[t] = tensor_count(index);
    }
    parallel_for(shape_span(&y->shape, 0, y->shape.rank - 1), parallel_rows(4 * j.width), rows_range, &j);
    return OK;
}

static size_t scale_bytes(const node *n) {
    return 2 * dtype_size(norm_computed_in(n->out[Y]->type)) * (size_t)shape_count(&n->in[EMBEDDING_SCALE]->shape);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static status infer_embedding_norm(graph *g, node *n) {
    const int64_t *dims;
    shape s = {.rank = node_ints(n, "shape", &dims)}, per_row;

    TRY(require(g, n, EMBEDDING_SCALE));
    for (int i = 0; i < s.rank; i++) s.dim[i] = dims[i];
    for (int i = EMBEDDING_ADDENDS; i < n->n_in; i += 2) {
        TRY(require(g, n, i));
        if (node_in(n, i + 1)) TRY(require_index(g, n, i + 1));
    }
    per_row = s;
    per_row.dim[s.rank - 1] = 1;
    const dtype type = n->in[EMBEDDING_ADDENDS]->type, computed = norm_computed_in(type);
    TRY(set_out(g, n, Y, type, &s));
    TRY(set_out(g, n, MEANS, computed, &per_row));
    TRY(set_out(g, n, INVERSES, computed, &per_row));
    return set_out(g, n, SUM_OUT, type, &s);
}

/* Every second operand from the first index on. */
#define INDEX(t) OPERAND(EMBEDDING_ADDENDS + 2 * (t) + 1)
#define INDICES (INDEX(0) | INDEX(1) | INDEX(2) | INDEX(3))
_Static_assert(EMBEDDING_TABLES == 4, "INDICES names them all");

/* clang-format off */
const op_def embedding_norm_ops[] = {
    {.name = "EmbeddingNorm", .domain = ORT_DOMAIN, .since = 1, .min_in = EMBEDDING_ADDENDS + 3,
     .max_in = EMBEDDING_ADDENDS + 2 * EMBEDDING_TABLES, .max_out = 4, .dtypes = FLOATS, .checked = INDICES,
     .attrs = NODE_ATTRS(NO_DEFAULT("shape", INTS), NO_DEFAULT("epsilon", FLOAT), INT("from_end", 0)), .infer = infer_embedding_norm,
     .workspace = scale_bytes, .cpu = embedding_norm_cpu},
    {0},
};
/* clang-format on */
