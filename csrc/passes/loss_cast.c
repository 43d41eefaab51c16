/* loss_cast.c -- CrossEntropy(Cast(x, from 16 bits to float32), labels)  ->  CrossEntropy(x, labels, wide)
 *
 * Models widen their logits before the loss. It computes in float32 anyway: it reads the logits as they are, leaves its
 * result in float32, and its gradient comes in their type, rounded once as the cast's would be. So nothing of the size
 * of the logits is there in float32. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { SCORES, LABELS, WEIGHTS };

/* The 16-bit logits that are widened to `v`, for no other node, and reshaped at most; NULL: there are none. */
static value *narrow_behind(value *v) {
    while (value_is_private(v) && value_is(v, "Reshape")) v = v->def->in[0];
    if (!value_is_private(v) || !value_is(v, "Cast")) return NULL;
    v = v->def->in[0];
    return v->type == BF16 || v->type == F16 ? v : NULL;
}

static status read_narrow(graph *g, value *const v[], const node *root, value **out) {
    attr attrs[6];
    int count = 0;
    value *x;

    if (v[SCORES]->type != F32 || !(x = narrow_behind(v[SCORES]))) return OK;
    for (const attr *a = root->attrs; a && a->name; a++) attrs[count++] = *a;
    attrs[count++] = (attr)INT("wide", 1);
    attrs[count] = (attr){.name = NULL};
    TRY(emit_reshape(g, x, &v[SCORES]->shape, &x));
    return emit_with(g, out, "CrossEntropy", attrs, x, v[LABELS], v[WEIGHTS]);
}

static const rule rules[] = {
    {OP("CrossEntropy", VAR(SCORES), VAR(LABELS)), read_narrow},
    {OP("CrossEntropy", VAR(SCORES), VAR(LABELS), VAR(WEIGHTS)), read_narrow},
    {0},
};

const pass_def loss_cast = {.name = "loss_cast", .stage = BEFORE_GRADIENT, .level = 1, .rules = rules};
