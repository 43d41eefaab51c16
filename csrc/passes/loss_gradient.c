/* loss_gradient.c -- LinearCrossEntropyGrad(r dL, h, W, labels, lse)  ->  dL * LinearCrossEntropy(h, W, labels, r)
 *
 * A script that weighs the losses of the rows itself (a mask, a mean over each sequence) has an upstream gradient for
 * each row, and the gradient of the weight sums over rows: it cannot be scaled afterwards. But where one number dL alone
 * arrives in backward, the rows' gradients are that number times what they are for 1, and forward can compute those, r,
 * before it comes to the loss: from the mask, not from the losses. Then the logits are computed once, not twice. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { DLOSS, HIDDEN, WEIGHT, LABELS, LSE, BIAS, CLASS_WEIGHTS, UPSTREAM = 5 };
/* Nodes between the seed and the rows' gradients, and of forward that they need. */
enum { MOST_NODES = 128 };
/* What a node's mark says: the upstream gradient needs it; it needs the loss. */
enum { NEEDED = 1, AFTER_LOSS = 2 };

static void need_operands(const node *n) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && n->in[i]->def) n->in[i]->def->mark |= NEEDED;
}

static bool operand_is_marked(const node *n, int mark) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && n->in[i]->def && n->in[i]->def->mark & mark) return true;
    return false;
}

/* Marks what stands between the loss and its gradient; false when the rows' gradients need the loss, or too much. */
static bool mark_needed(node *loss, node *gradient) {
    int count = 0;

    for (node *n = loss; n != gradient->next; n = n->next) n->mark = 0;
    loss->mark = AFTER_LOSS;
    for (node *n = loss->next; n != gradient; n = n->next) n->mark = operand_is_marked(n, AFTER_LOSS) ? AFTER_LOSS : 0;
    if (gradient->in[DLOSS]->def) gradient->in[DLOSS]->def->mark |= NEEDED;
    for (node *n = gradient->prev; n != loss; n = n->prev) {
        if (!(n->mark & NEEDED)) continue;
        if (n->mark & AFTER_LOSS || n->op->flags & (EFFECT | RANDOM) || ++count > MOST_NODES) return false;
        need_operands(n);
    }
    return !(loss->mark & NEEDED);
}

static bool is_seed(const graph *g, const value *v) {
    for (int i = 0; i < g->n_outputs; i++)
        if (v && g->output_grads[i] == v) return true;
    return false;
}

/* The only gradient of an output that arrives there, a number; NULL: several do, or a tensor does. */
static value *only_seed(const graph *g, const node *loss, const node *gradient) {
    value *seed = is_seed(g, gradient->in[DLOSS]) ? gradient->in[DLOSS] : NULL;

    for (const node *n = loss->next; n != gradient; n = n->next)
        for (int i = 0; n->mark & NEEDED && i < n->n_in; i++) {
            if (!is_seed(g, n->in[i]) || n->in[i] == seed) continue;
            if (seed) return NULL;
            seed = n->in[i];
        }
    return seed && shape_count(&seed->shape) == 1 ? seed : NULL;
}

/* `n` of backward once more, in forward, where operands have become others. */
static status emit_in_forward(graph *g, const node *n, value **becomes) {
    value **in, **out;

    TRY(NEW(g->scratch, in, n->n_in + 1));
    TRY(NEW(g->scratch, out, n->n_out));
    for (int i = 0; i < n->n_in; i++) in[i] = n->in[i] && becomes[n->in[i]->id] ? becomes[n->in[i]->id] : n->in[i];
    TRY(graph_emit_op(g, n->op, n->attrs, n->n_in, in, n->n_out, out));
    for (int i = 0; i < n->n_out; i++) becomes[n->out[i]->id] = out[i];
    return OK;
}

/* The rows' gradients for a seed of 1, computed in front of the loss. */
static status emit_for_one(graph *g, node *loss, const node *gradient, value *seed, value **out) {
    value **becomes; /* [value id] */
    node *next;

    TRY(NEW(g->scratch, becomes, g->n_values));
    TRY(graph_full(g, seed->type, &seed->shape, 1, &becomes[seed->id]));
    for (node *n = loss->next; n != gradient; n = next) {
        next = n->next;
        if (!(n->mark & NEEDED)) continue;
        if (n->backward) TRY(emit_in_forward(g, n, becomes));
        else graph_move(g, n, loss);
    }
    *out = becomes[gradient->in[DLOSS]->id];
    return OK;
}

static status replace_gradient(graph *g, node *loss, node *gradient, value *seed, int *fired) {
    value *rows, *in[UPSTREAM + 1] = {loss->in[0], loss->in[1], loss->in[2], node_in(loss, 3), node_in(loss, 4)};
    value *out[4], *dloss, *scaled;

    pass_emits(g, loss, loss);
    TRY(emit_for_one(g, loss, gradient, seed, &rows));
    if (!rows || !shape_equal(&rows->shape, &gradient->in[DLOSS]->shape)) return OK;
    in[UPSTREAM] = rows;
    TRY(graph_emit_op(g, loss->op, loss->attrs, UPSTREAM + 1, in, 4, out));
    TRY(graph_replace(g, loss->out[0], out[0]));
    pass_emits(g, gradient, gradient);
    TRY(emit_cast(g, seed, gradient->out[0]->type, &dloss));
    TRY(emit_reshape(g, dloss, &SCALAR, &dloss));
    for (int i = 0; i < 3; i++) {
        if (!gradient->out[i]->n_uses && !value_is_end(gradient->out[i])) continue;
        TRY(emit(g, &scaled, "Mul", dloss, out[i + 1]));
        TRY(graph_replace(g, gradient->out[i], scaled));
    }
    ++*fired;
    return OK;
}

/* The LinearCrossEntropy whose gradient `n` is; NULL: none. */
static node *loss_behind(const node *n) {
    if (!node_is(n, "LinearCrossEntropyGrad")) return NULL;
    return value_is(n->in[LSE], "LinearCrossEntropy") ? n->in[LSE]->def : NULL;
}

static status rewrite(graph *g, node *n, int *fired) {
    node *loss;
    value *seed;

    if (!(loss = loss_behind(n)) || loss->backward) return OK;
    if (!mark_needed(loss, n) || !(seed = only_seed(g, loss, n))) return OK;
    return replace_gradient(g, loss, n, seed, fired);
}

static status run(graph *g, int *fired) { return pass_rewrite_each(g, rewrite, fired); }

const pass_def loss_gradient = {.name = "loss_gradient", .stage = AFTER_GRADIENT, .run = run};
