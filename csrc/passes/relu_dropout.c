/* relu_dropout.c -- ReluGrad(DropoutTrain(dy), y), of DropoutTrain(y)  ->  ReluDropoutGrad(dy, DropoutTrain(y))
 *
 * What a dropout gives of y >= 0 is greater than 0 where y is and where it keeps: the next layer keeps that for the
 * gradient of its weights. So nothing keeps y as well, and backward draws no random numbers. The bits are the same, but
 * where y is infinite or NaN and dropped: there forward gives NaN (as PyTorch's does), which tells nothing of y. */
#include "passes/pipeline.h"

#include "core/philox.h"
#include "ops/op.h"

enum { DY, Y, ROWS };

/* The dropout of `y` with the key and the rows of this one, which is of its gradient; NULL: there is none. */
static const node *dropout_of_result(const value *y, const node *of_gradient) {
    for (const use *u = y->uses; u; u = u->next) {
        const node *n = u->user;
        if (n->op && node_is(n, "DropoutTrain") && node_in(n, 1) == node_in(of_gradient, 1) &&
            node_int(n, "key") == node_int(of_gradient, "key"))
            return n;
    }
    return NULL;
}

/* Where backward has other readers of y, y is kept anyway. */
static bool has_two_readers(const value *y) { return y->n_uses == 2 && !value_is_end(y); }

static status read_what_is_left(graph *g, value *const v[], const node *root, value **out) {
    const node *of_gradient = root->in[0]->def, *first = dropout_of_result(v[Y], of_gradient);

    if (!first || first == of_gradient || !has_two_readers(v[Y])) return OK;
    return emit_with(g, out, "ReluDropoutGrad",
                     NODE_ATTRS(FLOAT("scale", dropout_factor(node_float(of_gradient, "ratio")))), v[DY],
                     first->out[0]);
}

static const rule rules[] = {
    {OP("ReluGrad", OP("DropoutTrain", VAR(DY)), VAR(Y)), read_what_is_left},
    {OP("ReluGrad", OP("DropoutTrain", VAR(DY), VAR(ROWS)), VAR(Y)), read_what_is_left},
    {0},
};

const pass_def relu_dropout = {.name = "relu_dropout", .stage = AFTER_GRADIENT, .rules = rules};
