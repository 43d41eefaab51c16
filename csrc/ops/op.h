/* op.h -- defines the operator record: everything the engine knows about an operator is a member of it. */
#ifndef ORT_OPS_OP_H
#define ORT_OPS_OP_H

#include "graph/emit.h"

/* One run of one node. Operands are tensors; outputs are contiguous; absent operands have type DT_NONE. A kernel may
 * find fewer than n_out outputs wanted: an unwanted one has type DT_NONE too. */
typedef struct call {
    const node *node; /* attributes */
    const tensor *in;
    tensor *out;
    int n_in, n_out;
    void *work;                      /* op->workspace bytes, 64-byte aligned */
    uint64_t seed;                   /* of the run; random operators mix it with their "key" attribute */
    const host *host;                /* of the run, or NULL (graph/host.h) */
    const struct offload_room *room; /* of the run, or NULL (core/offload.h) */
    const struct cuda_run *cuda;     /* where a cuda kernel runs (cuda/host/driver.h); NULL on the CPU */
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
    DISJOINT = 1 << 11,   /* with INPLACE: no other operand may lie in that memory */
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
    /* About what torch takes for itself while the node runs on the CPU by torch's operator; NULL: nothing. */
    int64_t (*torch_bytes)(const node *n);
    kernel_fn *cpu;
    /* Tells of every matrix product of a run on the CPU; operands have no memory. NULL: of none. */
    void (*products)(const call *k, product_fn *each, void *arg);
    /* Multiplications and additions, of what computes products in a kernel of its own; NULL: `products` tells. */
    double (*flops)(const node *n);
    /* The operator that makes out[0] once more of the operands and the other results, to the bit, on the CPU; NULL: this one. */
    const char *again;
    kernel_fn *cuda; /* on memory of a GPU: starts kernels and waits for nothing; NULL until there is one */
    size_t (*cuda_workspace)(const node *n);
    const char *(*through_torch)(const node *n); /* the ATen operator this node would run through torch, or NULL */
    const struct pointwise_def *pointwise;       /* the tile functions behind a POINTWISE operator */
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

/* --- what rules of inference share (ops/pointwise/common.c) ----------------------------------------------------------- */

status infer_same(graph *g, node *n);      /* out[0] like in[0] */
status infer_broadcast(graph *g, node *n); /* out[0]: all operands broadcast, one type */
/* Sets output i when it exists. */
MUST_USE status set_out(graph *g, node *n, int i, dtype type, const shape *s);
/* E_TYPE unless the present operands from `first` on have one type. */
MUST_USE status same_types(graph *g, const node *n, int first);
/* E_INVALID unless operand i is present. */
MUST_USE status require(graph *g, const node *n, int i);

#endif
