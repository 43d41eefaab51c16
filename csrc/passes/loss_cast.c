/* loss_cast.c -- CrossEntropy(Cast(x, from 16 bits to float32), labels)  ->  CrossEntropy(x, labels, wide)
 *
 * Models widen their logits before the loss. It computes in float32 anyway: it reads the logits as they are, leaves its
 * result in float32, and its gradient comes in their type, rounded once as the cast's would be. So nothing of the size
 * of the logits is there in float32. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/op.h"

enum { LOGITS, LABELS, WEIGHTS };

static status read_narrow(graph *g, value *const v[], const node *root, value **out) {
    attr attrs[6];
    int count = 0;
    value *x = value_before_widening(v[LOGITS]);

    if (!x) return OK;
    for (const attr *a = root->attrs; a && a->name; a++) attrs[count++] = *a;
    attrs[count++] = (attr)INT("wide", 1);
    attrs[count] = (attr){.name = NULL};
    TRY(emit_reshape(g, x, &v[LOGITS]->shape, &x));
    return emit_with(g, out, "CrossEntropy", attrs, x, v[LABELS], v[WEIGHTS]);
}

static const rule rules[] = {
    {OP("CrossEntropy", VAR(LOGITS), VAR(LABELS)), read_narrow},
    {OP("CrossEntropy", VAR(LOGITS), VAR(LABELS), VAR(WEIGHTS)), read_narrow},
    {0},
};

const pass_def loss_cast = {.name = "loss_cast", .stage = BEFORE_GRADIENT, .rules = rules};
