/* mask_removal.c -- attention on a GPU whose mask turns out to hide no key has none
 *
 *   MaskedSoftmax(x, keys and rest)  ->  MaskedSoftmax(x, rest)
 *
 * A batch without padding comes with its mask all the same. Only data says that this hides nothing; a plan is made for
 * either answer, and asks, as for the number of rows that matter. Without a mask, torch's kernels take attention as a
 * whole. What hides something is left to padding_removal. */
#include "passes/attention_mask.h"
#include "passes/rowwise.h"

#include "ops/op.h"
#include "ops/queries.h"

static bool is_wanted(const graph *g, const value *scores, const attention_mask *m) {
    const shape *s = &scores->shape;
    if (m->rest && (s->dim[2] != s->dim[3] || !attention_mask_causal(m->rest, s->dim[3]))) return false;
    return fused_attention_by_torch(g, F32, TORCH_ALL, s, 8, 8, false, !g->attention_everywhere);
}

/* Does it hide some key? */
static status hides(graph *g, value *keys, bool *any) {
    value *hidden;
    TRY(emit_reshape(g, keys, &SHAPE(shape_count(&keys->shape)), &hidden));
    TRY(emit(g, &hidden, "Not", hidden));
    return rows_any(g, hidden, any);
}

static status drop_mask(graph *g, node *n, int *fired) {
    value *out;
    attention_mask m;
    bool any;

    if (!node_is(n, "MaskedSoftmax") || !node_in(n, 1) || n->out[0]->shape.rank != 4) return OK;
    const shape *s = &n->out[0]->shape;
    if (!attention_mask_split(n->in[1], s->dim[0], s->dim[3], &m) || !is_wanted(g, n->out[0], &m)) return OK;
    TRY(hides(g, m.keys, &any));
    if (any) return OK;
    TRY(graph_emit(g, "MaskedSoftmax", NULL, 2, (value *[]){n->in[0], m.rest}, 1, &out));
    ++*fired;
    return graph_replace(g, n->out[0], out);
}

static status run(graph *g, int *fired) { return g->pending ? OK : pass_rewrite_each(g, drop_mask, fired); }

const pass_def mask_removal = {.name = "mask_removal", .stage = BEFORE_GRADIENT, .device = FOR_GPUS, .run = run};
