/* masked_softmax.c -- a mask around, or before, a softmax  ->  MaskedSoftmax(x, allowed)
 *
 *   where(hidden, 0, softmax(where(hidden, lowest, x)))       as our export writes attention: allowed = not hidden
 *   where(allowed, softmax(where(allowed, x, lowest)), 0)     the same
 *
 * The scores of attention are the largest values there are; the mask costs them two passes forward and two backward,
 * and in the operator nothing. `lowest` is -inf or the type's lowest number, so that what is masked comes out as 0.
 *
 * Both are NaN, or weigh what is hidden, too, where all that is allowed is -inf or the lowest number. So x is
 * made of products, or just what is -inf is hidden; other logits stay as they are. */
#include "passes/attention_mask.h"
#include "passes/pipeline.h"

#include "ops/op.h"

#include <math.h>

enum { X, ALLOWED, HIDDEN, LOWEST };

static bool is_lowest(const value *v) {
    static const double lowest[DTYPE_COUNT] = {
        [F32] = -0x1.fffffep127, [F64] = -0x1.fffffffffffffp1023, [BF16] = -0x1.fep127, [F16] = -65504};
    double x;
    return value_is_filled(v, &x) && x <= lowest[v->type];
}

/* Before it was made as large as its reader wanted: the operator broadcasts itself. */
static value *before_expand(value *v) {
    while (value_is(v, "Expand")) v = v->def->in[0];
    return v;
}

static status to_masked_softmax(graph *g, value *const v[], const node *root, value **out) {
    value *allowed = v[ALLOWED];

    if (!shape_equal(&v[X]->shape, &root->out[0]->shape)) return OK; /* the mask is larger than x */
    if (!is_lowest(v[LOWEST])) return OK;
    if (v[HIDDEN]) TRY(emit(g, &allowed, "Not", before_expand(v[HIDDEN])));
    if (!attention_is_computed(v[X]) && !attention_mask_finite(allowed, v[X])) return OK;
    return emit(g, out, "MaskedSoftmax", v[X], before_expand(allowed));
}

#define SOFTMAX(x) OP_WHERE(node_is_along_last_axis, "Softmax", x)

static const rule rules[] = {
    {OP("Where", VAR(HIDDEN), CONST(0), SOFTMAX(OP("Where", VAR(HIDDEN), ANYCONST(LOWEST), VAR(X)))),
     to_masked_softmax},
    {OP("Where", VAR(ALLOWED), SOFTMAX(OP("Where", VAR(ALLOWED), VAR(X), ANYCONST(LOWEST))), CONST(0)),
     to_masked_softmax},
    {0},
};

const pass_def masked_softmax = {.name = "masked_softmax", .stage = BEFORE_GRADIENT, .rules = rules};
