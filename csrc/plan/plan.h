/* plan.h -- turns a specialised graph into a flat array of instructions over one arena.
 *
 * One arena serves a run, forward and backward: values that backward needs are simply blocks whose life crosses from
 * the first part of the program to the second. Its size is known before anything is allocated.
 *
 * A step that makes large gradients, on the CPU, has a *joint* arena: it holds the gradients, too, in what forward's values
 * leave free. So there are two places for each block; a run has one arena or the other. */
#ifndef ORT_PLAN_PLAN_H
#define ORT_PLAN_PLAN_H

#include "ops/op.h"
#include "passes/made_by.h"
#include "plan/offsets.h"
#include "plan/order_rules.h"
#include "plan/recompute.h"

/* Bytes that divide the address of an arena and of all that lies in it. cuBLASLt wants its workspace on 256. */
enum { PLAN_ALIGNED = 64, PLAN_ALIGNED_ON_GPU = 256 };

typedef enum place {
    AT_NOTHING, /* an absent operand */
    AT_ARENA,
    AT_CONSTANT,
    AT_INPUT,       /* of the model: user inputs, parameters, buffers */
    AT_OUTPUT,      /* what forward returns */
    AT_WRITE,       /* new contents of an input's memory */
    AT_OUTPUT_GRAD, /* given to backward */
    AT_INPUT_GRAD,  /* what backward returns */
    PLACES,
} place;

typedef struct operand {
    tensor t; /* data is set for constants only */
    place place;
    int index;      /* which input, output, ... */
    int64_t offset; /* bytes from the beginning of that memory; of a constant on a GPU: among the plan's constants */
    int64_t joint;  /* the same in a run with a joint arena */
} operand;

/* A constant that kernels on a GPU read: a copy of it is among the plan's constants there. */
typedef struct device_constant {
    const void *data;
    int64_t bytes, offset;
} device_constant;

/* A place in the arena of a GPU's run for something that comes from elsewhere in every step: CUDA graphs know places. */
typedef struct fixed_place {
    int index;             /* of an input */
    int64_t bytes, offset; /* in the arena */
} fixed_place;

typedef struct instr {
    const node *node;
    operand *in, *out;
    int64_t work, joint_work; /* offset of the workspace in the arena, and in a joint one; -1: none */
} instr;

/* What a block of the arena is for: a value, or, without one, the workspace of a node. Neither: it is fixed. */
typedef struct block_use {
    const node *node;
    const value *value;
} block_use;

typedef struct layout layout;

typedef struct plan {
    graph *g;
    instr *code;
    int n_code, n_forward; /* forward is [0, n_forward), backward the rest */
    int most_operands;     /* of any instruction, operands and results together */
    bool cuda;             /* for a GPU */
    int64_t red_zone;      /* of a plan for a GPU: bytes behind every block that belong to nothing; 0: not looked at */
    device_constant *constants;
    int n_constants;
    int64_t constant_bytes; /* of all of them */
    int64_t seed_offset;    /* in the arena, of the run's seed; -1: not for a GPU, or nothing is drawn */
    fixed_place *fixed;     /* small inputs without a gradient */
    int n_fixed;
    int64_t arena_bytes;
    int64_t torch_bytes;   /* the most that torch takes for itself in one instruction, on the CPU; about */
    int64_t run_bytes;     /* of all that a run takes: the arena, outputs, writes, and these */
    int64_t offload_bytes; /* that a run needs elsewhere, for values that are offloaded (core/offload.h) */
    interval *blocks;      /* lives of the arena's blocks, in instructions */
    block_use *of_block;   /* [n_blocks], and of a plan with a joint arena [n_joint] */
    int n_blocks;
    int64_t joint_bytes;    /* of a joint arena; 0: the plan has none */
    interval *joint_blocks; /* [n_joint] the blocks in the same order, then the gradients */
    int n_joint;            /* 0: none */
    int64_t *joint_grad;    /* [inputs of the graph] where a joint arena has their gradients; -1: there is none */
    int64_t gradient_bytes; /* of all gradients, with a joint arena; or 0 */
    int n_writes;
    bool random;                 /* forward or backward draws random numbers: a run needs a seed */
    bool *reads_input;           /* [inputs of the model] backward reads it: it must not change before */
    bool *reads_output;          /* [outputs] the same */
    recompute_result again;      /* what backward computes again */
    const layout *where;         /* [value id] */
    order_rule order;            /* of its instructions */
    int64_t orders[ORDER_RULES]; /* the most bytes that values need at one time in each, gradients in the arena, too */
    int compiles;                /* of the whole model until it was found */
    int fired[MAX_PASSES];       /* how often each pass changed something */
    made_by made;                /* which pass made a node */
} plan;

/* Consumes `g` (it inserts copies where a kernel needs them). The plan lives in the graph's context. `cuda`: for a GPU;
 * E_UNSUPPORTED names an operator that has no kernel there. */
MUST_USE status plan_make(graph *g, bool cuda, plan **out);

/* Bytes that a step takes beside its gradients, which the arena may have in it. */
static inline int64_t plan_beside_gradients(const plan *p) {
    return p->joint_bytes ? p->joint_bytes - p->gradient_bytes : p->arena_bytes;
}

/* Bytes of the arena of one kind of run, and its blocks. */
static inline int64_t plan_arena_bytes(const plan *p, bool joint) { return joint ? p->joint_bytes : p->arena_bytes; }
static inline const interval *plan_arena_blocks(const plan *p, bool joint, int *count) {
    *count = joint ? p->n_joint : p->n_blocks;
    return joint ? p->joint_blocks : p->blocks;
}

/* How many inputs the model has: they come first among those of the graph; the outputs' gradients follow. */
int plan_model_inputs(const plan *p);

/* What instructions [from, to) read or write beside the arena: flags[place][index] becomes true; places may be NULL. */
void plan_uses(const plan *p, int from, int to, bool *const flags[PLACES]);

/* When backward can let go of each input's gradient: from first[input] to before last[input] it uses that memory, and
 * last[input] is behind all its reads of the input itself, too. So a hook that gets the gradient then may change both.
 * [inputs of the graph]; -1: there is no gradient. */
void plan_gradient_lives(const plan *p, int *first, int *last);

/* --- inside this folder -------------------------------------------------------------------------------------------- */

/* Where a value's elements are: strides over the memory of `root` (itself, unless it is a view). */
struct layout {
    value *root;
    int64_t offset; /* elements */
    int64_t stride[MAX_RANK];
};

/* Decides for every value whether it is a view, and inserts "Contiguous" nodes before kernels that cannot read
 * strides and for results that need memory of their own. out[value id]. */
MUST_USE status layout_make(graph *g, layout **out);
/* The nodes that execute, forward first. Views do not execute. */
typedef struct run_order {
    const node **at;
    int count, n_forward;
} run_order;

/* As they are written. */
MUST_USE status order_make(graph *g, const layout *where, run_order *out);

typedef struct order_choice {
    order_rule rule;
    run_order order;
    int64_t bytes[ORDER_RULES]; /* the most that values need at one time in each order */
} order_choice;

/* Compares orders of the nodes, which are given as written. Another is chosen where it needs a thirty-second less. */
MUST_USE status order_choose(const graph *g, const layout *where, bool cuda, const run_order *written,
                             order_choice *out);
/* Is one number of bytes a thirty-second less than the other? */
bool order_is_worth(int64_t bytes, int64_t than);

tensor layout_tensor(const value *v, const layout *where);

#endif
