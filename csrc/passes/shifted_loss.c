/* shifted_loss.c -- CrossEntropy(x[:, a:b], labels)  ->  CrossEntropy(x, labels with ignored ones around)
 *
 * where a loss leaves few rows out, as the one of a language model does: its last token predicts nothing. So the rows
 * need not be copied without those, nor their gradient back, and a label for every row says which of them matter. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/op.h"

#include <string.h>

enum { LOGITS, LABELS, WEIGHTS };

/* The slice of leading axes whose rows are `v`, in another shape or a wider type; NULL: it is none. */
static const node *slice_behind(value *v, int64_t classes) {
    v = value_behind(v);
    if (!value_is(v, "StridedSlice") || v->shape.rank < 2 || v->shape.dim[v->shape.rank - 1] != classes) return NULL;
    return slice_keeps(v->def, v->shape.rank - 1) ? v->def : NULL;
}

static bool takes_most(const node *slice) {
    const int64_t all = shape_count(&slice->in[0]->shape);
    return shape_count(&slice->out[0]->shape) > all - all / 8;
}

/* The labels with `ignored` for each row that was left out. */
static status emit_labels(graph *g, const node *slice, value *labels, int64_t ignored, value **out) {
    shape part = slice->out[0]->shape, whole = slice->in[0]->shape;
    const int64_t *starts, *steps;
    value *filler;

    node_ints(slice, "starts", &starts);
    node_ints(slice, "steps", &steps);
    part.rank--;
    whole.rank--;
    TRY(graph_scalar(g, labels->type, (double)ignored, &filler));
    TRY(emit_reshape(g, labels, &part, &labels));
    TRY(emit_with(g, &labels, "Place",
                  NODE_ATTRS(INTS("starts", part.rank, starts), INTS("shape", whole.rank, whole.dim),
                             INTS("steps", part.rank, steps)),
                  labels, filler));
    return emit_reshape(g, labels, &SHAPE(shape_count(&whole)), out);
}

static status to_whole(graph *g, value *const v[], const node *root, value **out) {
    value *x = v[LOGITS], *labels;
    const node *slice;

    if (x->shape.rank != 2 || !node_has(root, "ignore_index")) return OK;
    if (strcmp(node_string(root, "reduction"), "none") == 0) return OK;
    if (!(slice = slice_behind(x, x->shape.dim[1])) || !takes_most(slice)) return OK;
    TRY(emit_labels(g, slice, v[LABELS], node_int(root, "ignore_index"), &labels));
    TRY(emit_cast(g, slice->in[0], x->type, &x));
    TRY(emit_reshape(g, x, &SHAPE(labels->shape.dim[0], v[LOGITS]->shape.dim[1]), &x));
    return graph_emit_op(g, root->op, root->attrs, 3, (value *[]){x, labels, v[WEIGHTS]}, 1, out);
}

static const rule rules[] = {
    {OP("CrossEntropy", VAR(LOGITS), VAR(LABELS)), to_whole},
    {OP("CrossEntropy", VAR(LOGITS), VAR(LABELS), VAR(WEIGHTS)), to_whole},
    {0},
};

const pass_def shifted_loss = {.name = "shifted_loss", .stage = BEFORE_GRADIENT, .rules = rules};
