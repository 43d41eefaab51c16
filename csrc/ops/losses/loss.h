/* loss.h -- declares what losses share (loss.c): samples, their labels and weights, and their reduction. */
#ifndef ORT_OPS_LOSS_H
#define ORT_OPS_LOSS_H

#include "ops/op.h"

typedef struct loss_job loss_job;
typedef void rows_fn(const loss_job *j, int64_t begin, int64_t end);
typedef void columns_fn(const loss_job *j, int64_t batch, int64_t from, int64_t width);
typedef void add_columns_fn(const void *rows, int64_t count, int64_t width, int64_t begin, int64_t end, double *total);

struct loss_job {
    const void *x;
    void *dx;
    const tensor *labels, *weights, *dloss; /* weights may be absent */
    double *lse, *losses;                   /* [samples] */
    int64_t batch, classes, inner, samples; /* samples = batch * inner */
    bool ignores, each;                     /* there is an ignore_index; each sample has an upstream gradient */
    int64_t ignored;
    double divisor;    /* of the sum */
    double own;        /* 1 - smoothing: the share of the label itself */
    const void *share; /* [classes] that of every class, in the type that is computed with; NULL: no smoothing */
    double shares;     /* their sum */
    rows_fn *rows;
    columns_fn *columns;
};

/* By dtype, for logits [samples, classes]: each sample's lse and loss; dx; total[i] += the sum of a column. */
extern rows_fn *const loss_rows[DTYPE_COUNT], *const loss_grad_rows[DTYPE_COUNT];
extern add_columns_fn *const loss_add_columns[DTYPE_COUNT];

/* Of node attributes; labels are operand `labels`, weights operand `weights`, `s` the shape of the logits. */
loss_job loss_job_of(const call *k, const shape *s, int labels, int weights);
/* Calls j->rows, or j->columns, for all samples, on several threads. */
void loss_each_sample(loss_job *j);
/* The shares of the classes, in `type`; `memory` has loss_smoothing_bytes. */
void loss_smooth(loss_job *j, dtype type, void *memory);
size_t loss_smoothing_bytes(const node *n, int64_t classes);
/* Every label that counts must be a class: checked before anything is computed, in backward again, since the labels may
 * be the caller's. Adds up their weights, unless `weight`
 * is NULL. */
MUST_USE status loss_check_labels(ctx *c, const loss_job *j, double *weight);
/* The samples' losses into out[0], reduced in their order; what they are divided by into `divisor`. */
void loss_deliver(const call *k, const loss_job *j, double weight, const tensor *divisor);
/* The attributes of both losses and their gradients; room for one more. */
void loss_attrs(const node *n, attr attrs[5]);

/* Operand i of a call; of type DT_NONE where there is none. */
static inline const tensor *loss_operand(const call *k, int i) {
    static const tensor absent = {.type = DT_NONE};
    return i < k->n_in ? &k->in[i] : &absent;
}

#endif
