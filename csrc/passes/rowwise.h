/* rowwise.h -- computes a tensor's rows that are wanted, and no others.
 *
 * A *row* is what lies at one place of a tensor's leading axes: of [B, S, H] and of [B * S, H] each of N = B * S rows.
 * Of nodes that compute every row from the same row of their operands (linear layers, norms, activations, dropout,
 * embeddings) any set of rows can be computed alone. */
#ifndef ORT_PASSES_ROWWISE_H
#define ORT_PASSES_ROWWISE_H

#include "passes/pipeline.h"

typedef struct known_rows {
    const value *of;
    value *rows;
} known_rows;

typedef struct row_set {
    graph *g;
    int64_t all, count; /* rows there are, and that are computed */
    value *rows;        /* their numbers, int64 [count]; NULL while only questions are asked */
    bool packed; /* they come from RowIndex (ops/movement/rows.c); otherwise in any order, and a row may come twice */
    known_rows *known; /* [table_size] a hash table of the values whose rows have been taken or computed */
    int table_size, n_known;
    node **above; /* [n_above] what rows_find_above has found */
    int n_above;
} row_set;

/* A set of which `all` is known; memory is taken when it is needed. */
row_set rows_of(graph *g, int64_t all, value *rows, bool packed);
/* The rows of `v`, which rows_take or rows_compute has made; NULL: they have not. */
value *rows_known(const row_set *r, const value *v);
/* How many rows a plan computes where `live`, bool [all], says which matter. E_PENDING when data decides (see
 * graph_data_size). */
MUST_USE status rows_count(graph *g, value *live, int64_t *count);
/* Whether some row is live; asked for as rows_count asks. A plan for true serves both. */
MUST_USE status rows_any(graph *g, value *live, bool *any);
/* Which labels are not `ignored`: bool. */
MUST_USE status rows_labelled(graph *g, value *labels, int64_t ignored, value **out);
/* The number of leading axes that make up the rows; 0: `v` has none. */
int rows_axes(const row_set *r, const value *v);
/* Can `n` be computed row by row? */
bool rows_apart(const row_set *r, const node *n);
/* Is operand `i` of such a node cut into rows, too? Otherwise all rows share it. */
bool rows_operand(const row_set *r, const node *n, int i);
/* The wanted rows of `v`, [count, ...]: as computed before, or taken from all. */
MUST_USE status rows_take(row_set *r, value *v, value **out);
/* Computes the wanted rows of n->out[0] from those of its operands, and remembers them. */
MUST_USE status rows_compute(row_set *r, const node *n);

/* --- rows move up ----------------------------------------------------------------------------------------------------
 * Where operand `i` of `sink` is all that is seen of a value, and of what it is computed from row by row. */

/* Finds these nodes; *products is the number of matrix products among them. Takes as long as they have operands. */
MUST_USE status rows_find_above(row_set *r, const node *sink, int i, int *products);
/* Computes the nodes found for the wanted rows; *out are those of the operand. */
MUST_USE status rows_compute_above(row_set *r, const node *sink, int i, value **out);

/* With less, finding out which rows matter takes longer than computing them. */
enum { FEWEST_ROWS = 96 };
/* Whether so many rows of all are few enough for computing them alone. */
static inline bool rows_pay(int64_t count, int64_t all) { return count <= all - all / 8 && count < all; }

/* pass_rewrite_each by functions that call rows_find_above, unless a size is not known yet. */
MUST_USE status rows_rewrite_each(graph *g, node_rewrite *rewrite, int *fired);

#endif
