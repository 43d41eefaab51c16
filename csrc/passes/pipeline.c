/* pipeline.c -- the table of passes and the loop over it. */
#include "passes/pipeline.h"

#include "passes/made_by.h"

#include <string.h>

extern const pass_def attention_fusion, attention_lengths, clean_up, concat_gradient, concat_slices, early_cast,
    efficient_attention, embedding_norm, flash_dropout, gelu_fusion, gradient_marks, gradient_sum, label_sparsity,
    linear_loss, loss_cast, loss_gradient, mask_removal, masked_softmax, matmul_fusion, norm_fusion, norm_residual,
    packed_weights, padding_removal, parallel_products, pointwise_fusion, product_cast, product_epilogue, relu_dropout,
    rotary_fusion, row_fusion, row_selection, score_mask, shifted_loss, silu_fusion, softmax_cast, softmax_dropout,
    triton_fusion, wide_operands;

/* clang-format off */
const pass_def *const passes[] = {
    &clean_up,
    &masked_softmax,
    &gelu_fusion,
    &silu_fusion,
    &norm_fusion,
    &early_cast,
    &rotary_fusion,
    &matmul_fusion,
    &row_selection,
    &shifted_loss,
    &label_sparsity,
    &score_mask,
    &mask_removal,
    &padding_removal,
    &flash_dropout,
    &attention_fusion,
    &efficient_attention,
    &attention_lengths,
    &softmax_cast,
    &softmax_dropout,
    &linear_loss,
    &loss_cast,
    &parallel_products,
    &loss_gradient,
    &gradient_marks,
    &concat_gradient,
    &concat_slices,
    &product_cast,
    &relu_dropout,
    &gradient_sum,
    &product_epilogue,
    &wide_operands,
    &packed_weights,
    &embedding_norm,
    &norm_residual,
    &triton_fusion,
    &pointwise_fusion,
    &row_fusion,
    NULL,
};
/* clang-format on */

_Static_assert(sizeof passes / sizeof *passes - 1 <= MAX_PASSES, "a pass has one of 64 bits");

#ifdef ORT_VERIFY
static status check(graph *g) { return graph_verify(g); }
#else
static status check(graph *g) { return (void)g, OK; }
#endif

uint64_t pass_bit(const char *name) {
    for (int i = 0; passes[i]; i++)
        if (strcmp(passes[i]->name, name) == 0) return UINT64_C(1) << i;
    return 0;
}

static bool is_for(const pass_def *pass, const graph *g) {
    return pass->device == EVERYWHERE || pass->device == (g->cuda ? FOR_GPUS : FOR_CPUS);
}

static status run_pass(graph *g, const pass_def *pass, int *fired) {
    ctx scratch;
    status s;

    *fired = 0;
    ctx_init(&scratch);
    scratch.mem.fail_after = g->c->mem.fail_after;
    g->scratch = &scratch;
    s = pass->rules ? rules_apply(g, pass->rules, fired) : pass->run(g, fired);
    g->scratch = g->c;
    if (s != OK && scratch.err.code != OK) g->c->err = scratch.err;
    ctx_release(&scratch);
    return s == OK ? check(g) : s;
}

static void note_made(made_by *made, int pass, int first, int last) {
    if (!made || first == last || made->count == (int)(sizeof made->ran / sizeof *made->ran)) return;
    made->ran[made->count].pass = pass;
    made->ran[made->count].first = first;
    made->ran[made->count++].last = last;
}

int made_by_pass(const made_by *made, const node *n) {
    for (int i = 0; i < made->count; i++)
        if (made->ran[i].first <= n->id && n->id < made->ran[i].last) return made->ran[i].pass;
    return -1;
}

status passes_run_noting(graph *g, pass_stage stage, uint64_t disabled, int *fired, made_by *made) {
    for (int i = 0; passes[i]; i++) {
        const int first = g->n_nodes;
        int count;
        if (!(passes[i]->stage & stage) || (disabled >> i & 1) || !is_for(passes[i], g)) continue;
        TRY_AT(g->c, run_pass(g, passes[i], &count), "running the pass %s", passes[i]->name);
        note_made(made, i, first, g->n_nodes);
        if (fired) fired[i] += count;
    }
    return OK;
}

status passes_run(graph *g, pass_stage stage, uint64_t disabled, int *fired) {
    return passes_run_noting(g, stage, disabled, fired, NULL);
}
