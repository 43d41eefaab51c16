/* row_reach.h -- says which rows of a batch of sequences can reach a result.
 *
 * Everything computed from tokens of a batch [B, S] has B * S rows at first. Let some of them hold anything at all: which
 * parts of which values may change? What is computed row by row changes in the same rows; attention passes a row on to
 * those that may look at it; a loss stops a row whose label it ignores, a selection a row that it does not select. If
 * nothing that is seen changes, those rows need not be computed. */
#ifndef ORT_PASSES_ROW_REACH_H
#define ORT_PASSES_ROW_REACH_H

#include "graph/graph.h"

/* Two axes of a value: which sequence, and which token of it. One axis twice: it numbers all rows. `stream` is the id of
 * the value that such rows began with; rows of two streams become those of one where they meet. */
typedef struct row_axes {
    int batch, token, stream;
} row_axes;

/* What may change in a value: elements of which one of the pairs names a row that does not matter. */
typedef struct row_state {
    int count; /* of pairs: 0: nothing changes */
    row_axes at[2];
    bool
        has_zeros; /* it is 0 where this pair names such a row: as it is, or if `factor`, one number a row, is 0 there */
    row_axes zeros;
    value *factor;
} row_state;

/* Rows that matter, and why. */
typedef enum need_kind {
    NEED_NONZERO, /* `value`, one number a row, is not 0 */
    NEED_ALLOWED, /* `value`, a mask of attention [B, h, Q, S], lets some query look at them */
    NEED_LABELS,  /* `value`, one label a row, is not `ignored` */
    NEED_INDEX,   /* `value` lists their numbers */
} need_kind;

typedef struct row_need {
    need_kind kind;
    value *value;
    int64_t ignored;
} row_need;

enum { MOST_NEEDS = 32 };

typedef struct row_reach {
    graph *g;
    int64_t batch, length;
    row_state *states; /* [n_values], by value id */
    int *joined;       /* [n_values] the stream that a stream has become a part of, or itself */
    bool *masked;      /* [n_values] attention's mask says which rows of the stream are looked at */
    int n_values;
    row_need needs[MOST_NEEDS];
    int n_needs;
} row_reach;

/* Follows the rows of all tokens [batch, length] through the graph. *closed: nothing changes that is seen, so that rows
 * which no need names do not matter. Where padding is unseen, an output's rows may that such a mask is for. */
MUST_USE status rows_follow(graph *g, int64_t batch, int64_t length, row_reach *out, bool *closed);
/* Is `v` made of rows that change alone, its leading axes? */
bool rows_lead(const row_reach *r, const value *v);
/* Are these the tokens that begin a row: a look-up [batch, length] in a table? */
bool rows_begin_at(const row_reach *r, const node *n);

#endif
