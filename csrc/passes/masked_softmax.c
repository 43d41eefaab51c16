/* masked_softmax.c -- a mask around, or before, a softmax  ->  MaskedSoftmax(x, allowed)
 *
 *   where(allowed, softmax(where(allowed, x, lowest)), 0)      as our export writes attention
 *   MaskedSoftmax(x + where(allowed, 0, -inf))                 as torch's does
 *
 * The scores of attention are the largest values there are; the mask costs them two passes forward and two backward,
 * and in the operator nothing. `lowest` is -inf or the type's lowest number, so that what is masked comes out as 0. */
#include "passes/pipeline.h"

#include "ops/op.h"

#include <math.h>
#include <string.h>

enum { X, ALLOWED, LOWEST };

static bool over_last_axis(const node *n) {
    int64_t axis = node_int(n, "axis");
    return n->in[0]->shape.rank > 0 && (axis == -1 || axis == n->in[0]->shape.rank - 1);
}

static bool is_lowest(const value *v) {
    static const double lowest[DTYPE_COUNT] = {
        [F32] = -0x1.fffffep127, [F64] = -0x1.fffffffffffffp1023, [BF16] = -0x1.fep127, [F16] = -65504};
    double x;
    return value_is_filled(v, &x) && x <= lowest[v->type];
}

/* Before it was made as large as its reader wanted: the operator broadcasts itself. */
static value *before_expand(value *v) {
    while (v->def && strcmp(v->def->op->name, "Expand") == 0) v = v->def->in[0];
    return v;
}

static status to_masked_softmax(graph *g, value *const v[], const node *root, value **out) {
    if (!shape_equal(&v[X]->shape, &root->out[0]->shape)) return OK; /* the mask is larger than x */
    if (v[LOWEST] && !is_lowest(v[LOWEST])) return OK;
    return emit(g, out, "MaskedSoftmax", v[X], before_expand(v[ALLOWED]));
}

static const rule rules[] = {
    {OP("Where", VAR(ALLOWED), OP_WHERE(over_last_axis, "Softmax", OP("Where", VAR(ALLOWED), VAR(X), ANYCONST(LOWEST))),
        CONST(0)),
     to_masked_softmax},
    {OP("MaskedSoftmax", OP("Add", OP_SHARED("Where", VAR(ALLOWED), CONST(0), CONST(-INFINITY)), VAR(X))),
     to_masked_softmax},
    {0},
};

const pass_def masked_softmax = {.name = "masked_softmax", .stage = BEFORE_GRADIENT, .level = 1, .rules = rules};
