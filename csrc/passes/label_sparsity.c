/* label_sparsity.c -- a loss that ignores some labels sees the rows of the others only
 *
 *   CrossEntropy(f(x), labels)  ->  rows = those with labels != ignore_index
 *                                   CrossEntropy(f(x[rows]), labels[rows])
 *
 * for everything row by row between x and the loss, a language model's head and what lies before it up to attention.
 * It has to be the loss alone that looks. How many rows there are is decided by data; repetitions that round their
 * number up have an ignored label. */
#include "passes/rowwise.h"

#include "ops/op.h"

#include <string.h>

enum { LOGITS, LABELS };

static bool is_loss(const node *n) {
    if (!node_is(n, "CrossEntropy") && !node_is(n, "Nll")) return false;
    if (!node_has(n, "ignore_index") || n->in[LOGITS]->shape.rank != 2 || value_is_constant(n->in[LABELS]))
        return false;
    for (int i = 1; i < n->n_out; i++)
        if (n->out[i] && n->out[i]->n_uses) return false;
    return !n->in[LABELS]->def || !node_is(n->in[LABELS]->def, "PackRows"); /* done already */
}

/* The loss over packed rows. */
static status emit_loss(row_set *r, const node *loss, value *logits, value **out) {
    double ignored = (double)node_int(loss, "ignore_index");
    value *labels;

    TRY(emit_with(r->g, &labels, "PackRows", NODE_ATTRS(INT("repeat", 0), FLOAT("filler", ignored)), loss->in[LABELS],
                  r->rows));
    TRY(graph_emit_op(r->g, loss->op, loss->attrs, 3, (value *[]){logits, labels, node_in(loss, 2)}, 1, out));
    if (strcmp(node_string(loss, "reduction"), "none") != 0) return OK;
    return emit_with(r->g, out, "UnpackRows", NODE_ATTRS(INT("size", r->all)), *out, r->rows);
}

static status rewrite_loss(graph *g, node *loss, int *fired) {
    value *live, *rows, *logits, *out;
    int64_t all, count;
    int products;
    row_set r;

    if (!is_loss(loss)) return OK;
    all = loss->in[LOGITS]->shape.dim[0];
    if (all < FEWEST_ROWS) return OK;
    r = rows_of(g, all, NULL, true);
    TRY(rows_find_above(&r, loss, LOGITS, &products));
    if (products == 0) return OK;
    TRY(rows_labelled(g, loss->in[LABELS], node_int(loss, "ignore_index"), &live));
    TRY(rows_count(g, live, &count));
    if (!rows_pay(count, all)) return OK;
    TRY(emit_with(g, &rows, "RowIndex", NODE_ATTRS(INT("count", count)), live));
    r.rows = rows;
    r.count = count;
    TRY(rows_compute_above(&r, loss, LOGITS, &logits));
    TRY(emit_loss(&r, loss, logits, &out));
    ++*fired;
    return graph_replace(g, loss->out[0], out);
}

static status run(graph *g, int *fired) { return rows_rewrite_each(g, rewrite_loss, fired); }

const pass_def label_sparsity = {.name = "label_sparsity", .stage = BEFORE_GRADIENT, .run = run};
