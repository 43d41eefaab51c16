/* early_cast.c -- Cast(Expand(x), to a narrower float)  ->  Expand(Cast(x)), with Reshapes and Transposes among them
 *
 * Fewer elements are rounded, and fewer bytes repeated: the keys of grouped-query attention, which rotary embeddings leave in
 * float32 under autocast. Their gradient is then rounded where it has been added up. So that is done only where it is
 * rounded to that type behind x anyway: whatever of x has a gradient comes from numbers of that type. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/op.h"

enum { X, DEEPEST = 8 };

/* Does the gradient of v end in values of this type, by way of pointwise operators and parts alone? */
static bool is_of_narrow(const value *v, dtype to, int depth) {
    static const char *const through[] = {"Concat", "StridedSlice", "Reshape", "Transpose", "Expand"};

    if (!v->needs_grad || v->type == to) return true;
    if (!v->def || depth == DEEPEST) return false;
    bool known = (v->def->op->flags & POINTWISE) != 0;
    for (size_t i = 0; i < sizeof through / sizeof *through; i++) known |= value_is(v, through[i]);
    for (int i = 0; known && i < v->def->n_in; i++)
        known = !v->def->in[i] || is_of_narrow(v->def->in[i], to, depth + 1);
    return known;
}

static status cast_before(graph *g, value *const v[], const node *root, value **out) {
    const dtype to = root->out[0]->type;
    view_steps steps;
    value *x = view_steps_before(v[X], &steps);

    if (!steps.repeats || !dtype_is_float(to) || !dtype_is_float(x->type) || dtype_size(to) >= dtype_size(x->type))
        return OK;
    if (!is_of_narrow(x, to, 0)) return OK;
    TRY(emit_cast(g, x, to, &x));
    return view_steps_again(g, &steps, x, out);
}

static const rule rules[] = {{OP("Cast", VAR(X)), cast_before}, {0}};

const pass_def early_cast = {.name = "early_cast", .stage = BEFORE_GRADIENT, .rules = rules};
