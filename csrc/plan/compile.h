/* compile.h -- goes the whole way from a model and the shapes of its inputs to a plan. */
#ifndef ORT_PLAN_COMPILE_H
#define ORT_PLAN_COMPILE_H

#include "plan/plan.h"
#include "plan/recompute.h"
#include "shape/specialise.h"

typedef struct compile_options {
    const bool *output_grads; /* [outputs] which receive gradients; NULL: inference, no backward */
    int n_known, n_sizes;     /* sizes that data decides, as far as they are known: the model's, and those of passes */
    const known_size *known;
    const int64_t *sizes;
    const host *host;                  /* tells what its nodes compute; NULL: models must not have any */
    bool padding_unseen;               /* the caller reads no results of tokens that are padding */
    const struct triton_rules *triton; /* what becomes Triton kernels (graph/triton.h); NULL: nothing */
    uint64_t disabled_passes;          /* bit i: pass i of the pipeline does not run */
    bool cuda;                         /* for a GPU */
    bool any_size;           /* a plan that this machine has no memory for is made all the same: it will not run here */
    recompute_request again; /* what backward computes again */
    int64_t joint_from;      /* as in graph.h */
} compile_options;

/* Everything is allocated from `c`, which may be started anew; the model is only read and must outlive the plan. */
MUST_USE status compile(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, plan **out);

/* The same with a plan that takes at most `budget` bytes for its arena, what forward gives and the gradients that
 * backward gets for it: it computes again what it takes, and nothing where all fits. E_NOMEM, which names the least that can be reached and what
 * is the largest in it, where it does not. Starts `c` anew more than once. */
MUST_USE status compile_within(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o,
                               int64_t budget, plan **out);

#endif
