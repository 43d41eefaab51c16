/* queries.h -- says what a pass may ask of families of operators, and what it may have them emit. */
#ifndef ORT_OPS_QUERIES_H
#define ORT_OPS_QUERIES_H

#include "ops/op.h"

/* --- products (ops/products/matmul.c) ------------------------------------------------------------------------------ */

/* MatMul or MatMulBias? */
bool product_is(const node *n);
/* Its factor, which is 1 of a MatMul. */
double product_alpha(const node *n);
/* A product like `n`, with its factor and the type of its result, of other operands. */
MUST_USE status product_emit(graph *g, const node *n, int n_in, value *const in[], value **out);
/* Can products round a float32 operand to these 16 bits while they read it? */
bool product_rounds(dtype narrow);
/* The right operand of `n`, a matrix, packed as products like `n` read it: MatMulBias has it as its fourth operand. NULL where
 * nothing is gained by that. */
MUST_USE status product_prepack(graph *g, const node *n, value **out);

/* --- chains of pointwise operators (ops/chains/fused.c) ------------------------------------------------------------ */

/* The most steps, operands, results and totals of one chain. */
enum { FUSED_STEPS = 24, FUSED_OPERANDS = 12, FUSED_RESULTS = 8, FUSED_FOLDS = 4 };

/* Steps are nodes in an order in which operands come first and whose results are of one shape; results[] counts among
 * them. Folds are reductions of a step each, all along the same axes, a bit set. */
typedef struct fused_chain {
    int n_steps, n_results, n_folds;
    node *steps[FUSED_STEPS], *folds[FUSED_FOLDS];
    int results[FUSED_STEPS];
    unsigned axes;
} fused_chain;

/* Whether `n` may be a step: pointwise, without errors to report, and of its operands' broadcast shape. */
bool fused_holds(const node *n);
/* Whether `n` may fold a step's result where the graph runs, and along which axes. `random`: a dropout is among the steps. */
bool fused_folds(const graph *g, const node *n, bool random, unsigned *axes);
/* One node that computes the chain: out[i] is what stands for the result of the step results[i], out[n_results + i] for
 * that of folds[i]. Bit for bit what the nodes compute one by one, but for the order of a GPU's sums. Without a result some
 * operand has the steps' shape. */
MUST_USE status fused_emit(graph *g, const fused_chain *ch, value **out);

/* --- chains of rows (ops/chains/fused_rows.c) ---------------------------------------------------------------------- */

/* The most stages of one node, and the most values that it reads and gives. */
enum { ROWS_STAGES = 8, ROWS_READS = 24, ROWS_GIVES = 12 };

/* Rows are what lies along the last axes, [kept, rank) of the shape. */
typedef struct rows_chain {
    shape shape;
    int kept;
    int n_stages, n_gives;
    node *stages[ROWS_STAGES]; /* in an order in which operands come first */
    value *gives[ROWS_GIVES];
} rows_chain;

/* Whether `n` folds rows of its elements: then their shape and how many axes are kept. */
bool fused_rows_folds(const node *n, shape *s, int *kept);
/* Whether `n` may be a stage: it folds these rows, or is a chain or a pointwise operator over elements or over rows. */
bool fused_rows_holds(const rows_chain *ch, const node *n);
/* A stage over rows, not over elements. */
bool fused_rows_small(const rows_chain *ch, const node *n);
/* The value behind reshapes and expansions. */
value *fused_rows_source(value *v);
/* Whether `n` may read as `v` what a stage makes, the source of `v`: reshaped over rows, or from rows to what broadcasts as
 * totals do. */
bool fused_rows_reads(const rows_chain *ch, const node *n, value *v);
/* One node that computes the stages: out[i] stands for gives[i], and is of its shape. */
MUST_USE status fused_rows_emit(graph *g, const rows_chain *ch, value **out);

/* --- Triton kernels (ops/chains/triton_program.c) ------------------------------------------------------------------ */

/* The most nodes of one kernel, and the most values that it gives. */
enum { TRITON_NODES = 48, TRITON_GIVES = 12, TRITON_READS = 24 };

/* Nodes over elements of one shape, over its rows, or from one to the other; rows.kept is -1 while none knows of rows. */
typedef struct triton_chain {
    rows_chain rows; /* the shape and the kept axes alone */
    int n_nodes, n_gives;
    node *nodes[TRITON_NODES]; /* in an order in which operands come first */
    value *gives[TRITON_GIVES];
} triton_chain;

/* Whether the rules take this node at all; *counts: it is one of those that a kernel needs so many of. */
bool triton_takes(const graph *g, const node *n, bool *counts);
/* Whether `n` needs whole rows: then their shape and how many axes are kept. */
bool triton_folds(const node *n, shape *s, int *kept);
/* Whether `n` may be a part of the kernel. */
bool triton_holds(const triton_chain *ch, const node *n);
/* Whether `n` may read as its operand `i` what a part of the kernel makes, the source of that operand. */
bool triton_reads(const triton_chain *ch, const node *n, int i);
/* One node for all of them: out[i] stands for gives[i], and is of its shape. */
MUST_USE status triton_emit(graph *g, const triton_chain *ch, value **out);

/* --- attention (ops/attention/attention.c, fused_attention.c) ------------------------------------------------------ */

/* The longest rows of NarrowSoftmax, and the elements that it works on at a time. */
enum { NARROW_SOFTMAX_MOST = 4096 };
/* The widest heads that FusedAttention takes. */
enum { FUSED_ATTENTION_WIDTH = 256 };
/* Its attribute "torch": which keys torch's own kernel is asked for; TORCH_BIASED: all, with a bias that hides some. */
typedef enum torch_attention { TORCH_NONE, TORCH_ALL, TORCH_CAUSAL, TORCH_BIASED } torch_attention;
/* Whether FusedAttention is faster, so many queries and keys a sequence, than its parts. `masked`: some keys are hidden;
 * `dropout`: some weights are dropped. */
bool fused_attention_pays(const graph *g, dtype type, int64_t queries, int64_t keys, bool masked, bool dropout);
/* Whether torch's kernel takes `keys` of scores [B, H, Q, K] of heads of these widths, without a bias, and is better than
 * ours; `paying`: also than the parts. */
bool fused_attention_by_torch(const graph *g, dtype type, torch_attention keys, const shape *scores, int64_t width,
                              int64_t value_width, bool dropout, bool paying);
/* Whether flash attention of torch's is there for such heads on a GPU: it takes fewer heads of keys than of queries. */
bool fused_attention_flash(const graph *g, dtype type, int64_t width, int64_t value_width);

/* --- losses (ops/losses/linear_loss.c) ----------------------------------------------------------------------------- */

/* Whether LinearCrossEntropy is better than keeping the logits of so many rows. `twice`: backward computes them, too. */
bool linear_loss_pays(const graph *g, dtype type, int64_t rows, int64_t width, int64_t classes, bool twice);

/* --- norms (ops/norms/embedding_norm.c) ---------------------------------------------------------------------------- */

/* Operands of EmbeddingNorm: scale, bias, then a table and an index of each addend, of so many at most. */
enum { EMBEDDING_SCALE, EMBEDDING_BIAS, EMBEDDING_ADDENDS, EMBEDDING_TABLES = 4 };

#endif
