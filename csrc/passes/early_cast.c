/* early_cast.c -- Cast(Expand(x), to a narrower float)  ->  Expand(Cast(x)), with Reshapes and Transposes among them
 *
 * Fewer elements are rounded, and fewer bytes repeated: the keys of grouped-query attention, which rotary embeddings leave in
 * float32 under autocast. Their gradients add up in the narrow type's sums (in float32), and are rounded once more. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/op.h"

enum { X };

static status cast_before(graph *g, value *const v[], const node *root, value **out) {
    const dtype to = root->out[0]->type;
    view_steps steps;
    value *x = view_steps_before(v[X], &steps);

    if (!steps.repeats || !dtype_is_float(to) || !dtype_is_float(x->type) || dtype_size(to) >= dtype_size(x->type))
        return OK;
    TRY(emit_cast(g, x, to, &x));
    return view_steps_again(g, &steps, x, out);
}

static const rule rules[] = {{OP("Cast", VAR(X)), cast_before}, {0}};

const pass_def early_cast = {.name = "early_cast", .stage = BEFORE_GRADIENT, .level = 1, .rules = rules};
