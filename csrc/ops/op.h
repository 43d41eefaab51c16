/* op.h -- the operator record: everything the engine knows about an operator is a member of it. */
#ifndef ORT_OPS_OP_H
#define ORT_OPS_OP_H

#include "graph/graph.h"

/* One run of one node. Operands are tensors; outputs are contiguous; absent operands have type DT_NONE. A kernel may
 * find fewer than n_out outputs wanted: an unwanted one has type DT_NONE too. */
typedef struct call {
    const node *node; /* attributes */
    const tensor *in;
    tensor *out;
    int n_in, n_out;
    void *work;                  /* op->workspace bytes, 64-byte aligned */
    uint64_t seed;               /* of the run; random operators mix it with their "key" attribute */
    const host *host;            /* of the run, or NULL (graph/host.h) */
    const struct cuda_run *cuda; /* where a cuda kernel runs (cuda/host/driver.h); NULL on the CPU */
} call;

typedef status kernel_fn(ctx *c, const call *k);
struct gemm;
typedef void product_fn(void *arg, const struct gemm *g); /* told of a matrix product (gemm/gemm.h) */

typedef enum op_flag {
    COMMUTATIVE = 1 << 0, /* the first two operands may be swapped */
    POINTWISE = 1 << 1,   /* each output element depends on the (broadcast) operands' elements at its place only */
    RANDOM = 1 << 2,      /* never folded, never merged; has a "key" */
    INPLACE_0 = 1 << 3,   /* out[0] may be written over a dying, contiguous in[0] of the same type and shape */
    INPLACE_1 = 1 << 4,   /* the same for in[1] */
    STRIDED = 1 << 5,     /* reads operands of any strides; otherwise they arrive contiguous */
    NO_GRAD = 1 << 6,     /* outputs never carry a gradient (integers, comparisons) */
    EFFECT = 1 << 7,      /* never removed, never merged */
    KEEP = 1 << 8,        /* never constant-folded although deterministic */
    IN_MODELS = 1 << 9,   /* ours: exported models have it. The others only the engine emits, with operands that fit */
    COSTLY = 1 << 10,     /* pointwise, and takes longer than loading its result */
    APART = 1 << 11,      /* with INPLACE: no other operand may lie in that memory */
    INPLACE_ON_CPU = 1 << 12, /* with INPLACE: only on a CPU; a library's kernels promise nothing of the kind */
} op_flag;

enum { VARIADIC = -1 };

/* A set of one operand, and of all of them; the 32nd and those behind it are one. */
#define OPERAND(i) (1u << ((i) < 31 ? (i) : 31))
#define ALL_OPERANDS (~0u)

typedef struct op_def op_def;
struct op_def {
    const char *name;   /* NULL ends a family */
    const char *domain; /* "" is ONNX, ORT_DOMAIN ours */
    int since;          /* first opset version of this form; the reader takes the newest that is not too new */
    int min_in, max_in; /* max VARIADIC: any number */
    int max_out;        /* VARIADIC: any number */
    dtype_set dtypes;   /* allowed for the first operand present; 0: not checked */
    unsigned flags;
    const attr *attrs; /* every attribute there is, with its default or NO_DEFAULT */

    /* Types and shapes of n->out[] from n->in[] (and from constant operands' data). Absent outputs are NULL. */
    status (*infer)(graph *g, node *n);
    /* Composition: emits simpler operators and sets out[]; such an operator needs no infer, grad or kernel. It may
     * decline by leaving out[0] NULL. `n` is not in the graph; its outputs have no shapes. */
    status (*lower)(graph *g, const node *n, value **out);
    /* After infer: sets out[0] to an existing or simpler value when the node is not needed (x * 1, a cast to the
     * same type); leaves it NULL otherwise. `n` is not in the graph. */
    status (*simplify)(graph *g, const node *n, value **out);
    /* The maths alone: dx[i] for operands with need(n, i), from dy[] (NULL where no gradient arrives). The driver
     * accumulates, un-broadcasts dx[i] to the operand's shape and casts it to the operand's type. */
    status (*grad)(graph *g, const node *n, value *const dy[], value *dx[]);
    /* View: out[0] as strides over in[0]'s memory. Sets *possible; `offset` is in elements. Without it, or when it is
     * not possible, the kernel copies. */
    status (*view)(ctx *c, const node *n, const tensor *in, tensor *out, int64_t *offset, bool *possible);
    size_t (*workspace)(const node *n); /* bytes of scratch; NULL: none */
    kernel_fn *cpu;
    /* Tells of every matrix product of a run on the CPU; operands have no memory. NULL: of none. */
    void (*products)(const call *k, product_fn *each, void *arg);
    kernel_fn *cuda; /* on memory of a GPU: starts kernels and waits for nothing; NULL until there is one */
    size_t (*cuda_workspace)(const node *n);
    const char *(*foreign)(const node *n); /* the ATen operator this node would run through torch, or NULL */
    const struct pointwise_def *pointwise; /* the tile functions behind a POINTWISE operator */
    /* What integers among the operands of a kernel are, sets of operands (OPERAND). Python can change memory that it
     * sees at any time and unseen, between forward and backward too: an integer that says where in memory to read or
     * write is checked in every run of the kernel, or only the engine can have written it. emit refuses an operand of
     * integers that is in none of the sets, unless the operator is POINTWISE or has a view rule. */
    unsigned checked; /* places in memory, which the kernel checks in every run */
    unsigned owned;   /* places in memory, which it trusts: the plan keeps them where only the engine writes */
    unsigned plain;   /* elements that are computed with, compared or moved; numbers that are known to the plan */
};

#define ORT_DOMAIN "ortmodule"

/* Newest record of `name` not newer than `opset` (0: the newest there is); domain NULL: ONNX first, then ours. */
const op_def *op_find(const char *domain, const char *name, int opset);
/* All families, each ended by a record without a name; NULL ends the list. */
extern const op_def *const op_families[];

/* For grad rules: does operand i need a gradient? */
static inline bool need(const node *n, int i) { return i < n->n_in && n->in[i] && n->in[i]->needs_grad; }

/* --- chains of pointwise operators (ops/chains/fused.c) -------------------------------------------------------------------- */

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

/* Can products round a float32 operand to these 16 bits while they read it (matmul.c)? */
bool product_rounds(dtype narrow);
/* The right operand of `n`, a matrix, as products like `n` read it: MatMulBias has it as its fourth operand. NULL where
 * nothing is gained by that (matmul.c). */
MUST_USE status product_lay_out(graph *g, const node *n, value **out);
/* MatMul or MatMulBias? */
bool product_is(const node *n);
/* Its factor, which is 1 of a MatMul. */
double product_alpha(const node *n);
/* A product like `n`, with its factor and the type of its result, of other operands. */
MUST_USE status product_emit(graph *g, const node *n, int n_in, value *const in[], value **out);
/* Whether `n` may be a step: pointwise, without errors to report, and of its operands' broadcast shape. */
bool fused_holds(const node *n);
/* Whether `n` may fold a step's result on the CPU, and along which axes. */
bool fused_folds(const node *n, unsigned *axes);
/* One node that computes the chain: out[i] is what stands for the result of the step results[i], out[n_results + i] for
 * that of folds[i]. Bit for bit what the nodes compute one by one. Without a result some operand has the steps' shape. */
MUST_USE status fused_emit(graph *g, const fused_chain *ch, value **out);

/* --- chains of rows (ops/chains/fused_rows.c) ---------------------------------------------------------------------------- */

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

/* --- softmax in 16 bits (ops/attention/attention.c) --------------------------------------------------------------------------- */

/* The longest rows of NarrowSoftmax, and the elements that it works on at a time. */
enum { NARROW_SOFTMAX_MOST = 4096 };

/* --- attention as one operator (ops/attention/fused_attention.c) -------------------------------------------------------------- */

/* The widest heads that it takes. */
enum { FUSED_ATTENTION_WIDTH = 256 };
/* Whether it is faster, so many queries and keys a sequence, than its parts. `masked`: some keys are hidden; `dropout`: some
 * weights are dropped. */
bool fused_attention_pays(const graph *g, dtype type, int64_t queries, int64_t keys, bool masked, bool dropout);
/* Its attribute "torch": which keys torch's own kernel is asked for. */
typedef enum torch_attention { TORCH_NONE, TORCH_ALL, TORCH_CAUSAL } torch_attention;
/* Whether that takes `keys` of scores [B, H, Q, K] of heads of these widths, without a bias, and is better than ours;
 * `paying`: also than the parts. */
bool fused_attention_by_torch(const graph *g, dtype type, torch_attention keys, const shape *scores, int64_t width,
                              int64_t value_width, bool dropout, bool paying);
/* Whether flash attention of torch's is there for such heads on a GPU: it takes fewer heads of keys than of queries. */
bool fused_attention_flash(const graph *g, dtype type, int64_t width, int64_t value_width);

/* --- a loss without its logits (ops/losses/linear_loss.c) ------------------------------------------------------------------ */

/* Whether LinearCrossEntropy is better than keeping the logits of so many rows. `twice`: backward computes them, too. */
bool linear_loss_pays(const graph *g, dtype type, int64_t rows, int64_t width, int64_t classes, bool twice);

/* --- a norm of embeddings (ops/norms/embedding_norm.c) -------------------------------------------------------------------- */

/* Operands of EmbeddingNorm: scale, bias, then a table and an index of each addend, of so many at most. */
enum { EMBEDDING_SCALE, EMBEDDING_BIAS, EMBEDDING_ADDENDS, EMBEDDING_TABLES = 4 };

/* --- inference shared by families (ops/pointwise/common.c) -------------------------------------------------------------------- */

status infer_same(graph *g, node *n);      /* out[0] like in[0] */
status infer_broadcast(graph *g, node *n); /* out[0]: all operands broadcast, one type */
/* Sets output i when it exists. */
MUST_USE status set_out(graph *g, node *n, int i, dtype type, const shape *s);
/* E_TYPE unless the present operands from `first` on have one type. */
MUST_USE status same_types(graph *g, const node *n, int first);
/* E_INVALID unless operand i is present. */
MUST_USE status require(graph *g, const node *n, int i);

/* --- helpers of gradient rules -------------------------------------------------------------------------------------- */

/* `dy` reduced or reshaped to shape `s` by undoing NumPy broadcasting. */
MUST_USE status sum_to(graph *g, value *dy, const shape *s, value **out);
MUST_USE status zeros_like(graph *g, const value *v, value **out);
MUST_USE status emit_scaled(graph *g, value *x, double factor, value **out); /* x * factor in x's type */
MUST_USE status emit_cast(graph *g, value *x, dtype type, value **out);
MUST_USE status emit_reshape(graph *g, value *x, const shape *s, value **out);
MUST_USE status emit_transpose(graph *g, value *x, const int *perm, value **out);
/* start, step: per axis of x; out[i] = x[start + i * step] with the shape `counts`. No node when that is x itself. */
MUST_USE status emit_slice(graph *g, value *x, const int64_t *start, const shape *counts, const int64_t *step,
                           value **out);
/* x[start .. start + count) along one axis. */
MUST_USE status emit_slice_axis(graph *g, value *x, int axis, int64_t start, int64_t count, value **out);
MUST_USE status emit_reduce(graph *g, const char *op, value *x, int n_axes, const int64_t *axes, bool keep,
                            value **out);

#endif
