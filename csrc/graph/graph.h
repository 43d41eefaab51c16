/* graph.h -- nodes, values and their uses.
 *
 * A *model* graph is what the reader makes: operators and names, shapes unknown. A *specialised* graph has every type
 * and shape as a number; it is made from a model for the shapes of one plan (shape/infer.c), and every node appended
 * to it is inferred, simplified, folded and deduplicated as it is emitted. So a pass or a gradient rule just emits.
 * Everything lives in the context's arena. */
#ifndef ORT_GRAPH_GRAPH_H
#define ORT_GRAPH_GRAPH_H

#include "core/ctx.h"
#include "core/shape.h"

typedef struct graph graph;
typedef struct node node;
typedef struct value value;
typedef struct host host;

/* --- attributes --------------------------------------------------------------------------------------------------- */

typedef enum attr_kind { ATTR_INT = 1, ATTR_FLOAT, ATTR_STRING, ATTR_INTS, ATTR_FLOATS, ATTR_TENSOR } attr_kind;

typedef struct attr {
    const char *name;   /* NULL ends a list */
    attr_kind kind;     /* 0: in a record, there is no default */
    attr_kind expected; /* records, when there is no default: the kind that a node gives */
    int64_t i;
    double f;
    const char *s;
    int count; /* of ints or floats */
    const int64_t *ints;
    const double *floats;
    const tensor *t; /* contiguous */
} attr;

/* For emit and for operator records: NODE_ATTRS(INT("axis", 1), INTS("perm", n, p)). */
#define INT(name_, value_) {.name = (name_), .kind = ATTR_INT, .i = (value_)}
#define FLOAT(name_, value_) {.name = (name_), .kind = ATTR_FLOAT, .f = (value_)}
#define STRING(name_, value_) {.name = (name_), .kind = ATTR_STRING, .s = (value_)}
#define INTS(name_, count_, values_) {.name = (name_), .kind = ATTR_INTS, .count = (count_), .ints = (values_)}
#define TENSOR(name_, value_) {.name = (name_), .kind = ATTR_TENSOR, .t = (value_)}
/* For records: an attribute without a default. NO_DEFAULT("axis", INT) */
#define NO_DEFAULT(name_, kind_) {.name = (name_), .expected = ATTR_##kind_}
#define NODE_ATTRS(...) ((const attr[]){__VA_ARGS__, {.name = NULL}})

/* --- nodes and values --------------------------------------------------------------------------------------------- */

typedef struct use {
    node *user;
    int index;                /* of the operand */
    struct use *next, **link; /* link: what points here, so that a use is taken out of the list at once */
} use;

/* A place among the graph's outputs, writes and gradients. */
typedef struct graph_end {
    int output; /* its number, or -1: */
    value **at;
    struct graph_end *next;
} graph_end;

struct value {
    int id;           /* dense in its graph */
    const char *name; /* from the model, or NULL */
    dtype type;
    shape shape;
    node *def; /* NULL for graph inputs and constants */
    int def_index;
    int input;        /* position among the graph's inputs, or -1 */
    const void *data; /* constants: contiguous elements, alive as long as the graph */
    bool needs_grad;  /* some graph input that needs a gradient reaches it through differentiable operators */
    use *uses;
    int n_uses;
    graph_end *ends, **last_end; /* the places that hold it (graph_set_end); last_end: where the next one goes */
    int n_ends;
    int sized; /* its number among the sizes that data decides, from 1, negative among known ones; 0: it is none of them yet */
    int mark; /* scratch of a walk over the graph; means nothing between walks */
};

struct node {
    int id;
    const struct op_def *op;
    const char *name; /* from the model: the name errors are reported with; gradients inherit it */
    const attr *attrs;
    value **in, **out; /* an absent optional operand, or an output that is not wanted, is NULL */
    use *reads;        /* [n_in] its places in the operands' lists of uses */
    int n_in, n_out;
    node *prev, *next; /* program order, always topological */
    int64_t place;     /* grows along the program order */
    bool backward;     /* made by the gradient builder */
    bool again;        /* forward runs it, too (plan/recompute.c): out[0] is made whether it is read or not */
    int mark;
};

/* A graph input whose memory is overwritten after forward: BatchNorm statistics, counters. */
typedef struct state_write {
    value *input, *value;
    struct state_write *next;
} state_write;

/* A size that data decides. The key is the place of the node that asks, and which of its sizes this is; of what passes ask
 * for 0. */
typedef struct known_size {
    int64_t key, size;
} known_size;
typedef struct pending_size {
    int64_t key;
    value *v;
} pending_size;
enum { MODEL_PLACE = 1 << 16 }; /* how far the places of nodes lie apart; the first is MODEL_PLACE */

struct graph {
    ctx *c;
    ctx *scratch; /* memory that dies with the pass that runs (passes/pipeline.c); outside of passes `c` */
    node *first, *last;
    node *before;   /* emit inserts before this node; NULL: at the end */
    value **inputs; /* user inputs, parameters, buffers; then, once there is a gradient, the outputs' gradients */
    int n_inputs;
    value **outputs; /* what forward returns */
    int n_outputs;
    state_write *writes, **last_write; /* last_write: where the next one goes */
    value **output_grads; /* [n_outputs] inputs of backward, NULL where none is expected; NULL before grad_build */
    value **input_grads;  /* [n_inputs before grad_build] what backward returns, NULL where there is none */
    int n_input_grads;
    int opset; /* of the default domain */
    int n_values, n_nodes;
    uint64_t made[4]; /* hashes of the operators that nodes were made of, a set (graph_has_made) */
    int n_made;       /* in it */
    int n_random;     /* keys given to random nodes so far */
    int n_simplified; /* nodes that did not have to get in */
    const known_size
        *known; /* sizes that data decides, as far as they are known: those that the model's nodes ask for */
    int n_known;
    int64_t place;        /* of the model's node that is emitted; 0: none is */
    int n_asked;          /* sizes that this node has asked for so far */
    const int64_t *sizes; /* those that passes ask for, in this order */
    int n_sizes;
    int n_sized;      /* of them, those that a value holds (value.sized) */
    const host *host; /* runs nodes of its own, or NULL (graph/host.h) */
    value *asked;     /* the operand whose numbers an inference wants (E_DATA) */
    value
        *pending; /* the value that holds the first size that is not known; behind make_prologue all that are pending */
    pending_size
        *pending_sizes; /* all that were asked for; none where what Python returns is asked for (ops/host_call.c) */
    int n_pending, pending_room;
    int64_t folded,
        fold_most;       /* bytes of results that were computed while the graph was made; 0, or the most of them */
    bool padding_unseen; /* the caller reads no results of tokens that are padding */
    const struct triton_rules *triton; /* what becomes Triton kernels (graph/triton.h); NULL: nothing */
    bool attention_everywhere;         /* FusedAttention is taken wherever it can be (passes/attention_fusion.c) */
    bool as_written;                   /* nothing is simplified (passes/clean_up.c) */
    bool cuda;                         /* it will run on a GPU */
    int64_t joint_from; /* bytes of gradients from which a run may have them in its arena (plan/plan.h); 0: never */
    bool specialised;
    bool tidy;             /* nothing has changed since dead nodes were removed */
    bool in_backward;      /* nodes emitted now are backward nodes */
    const char *emit_name; /* name given to nodes emitted now */
    node **table;          /* hash-consing: open addressing on (op, attributes, operands) */
    int table_size, table_used;
};

/* --- making ------------------------------------------------------------------------------------------------------- */

MUST_USE status graph_new(ctx *c, graph **out);
MUST_USE status graph_add_input(graph *g, const char *name, dtype type, const shape *s, value **out);
/* Copies `shape_count(s)` elements; `data` NULL leaves them zero and writable through the returned value's data. */
MUST_USE status graph_add_constant(graph *g, dtype type, const shape *s, const void *data, value **out);
/* A constant of rank 0; of rank 1. */
MUST_USE status graph_scalar(graph *g, dtype type, double x, value **out);
MUST_USE status graph_ints(graph *g, int count, const int64_t *x, value **out);
/* A node with `n_out` fresh outputs at g->before, as it is: no inference. Copies names, attributes and operands. */
MUST_USE status graph_add_node(graph *g, const struct op_def *op, const char *name, const attr *attrs, int n_in,
                               value *const *in, int n_out, node **out);
MUST_USE status graph_add_write(graph *g, value *input, value *v);
MUST_USE status graph_add_output(graph *g, value *v);
/* E_NOMEM where a table of `count` elements of `size` bytes, made while the graph is (weights of a Resize, places of a Pad),
 * would be a large part of all memory. */
MUST_USE status graph_check_table(graph *g, int64_t count, size_t size);
/* A constant over the same bytes as `from`, which must outlive `g`. */
MUST_USE status graph_share_constant(graph *g, const value *from, value **out);
/* The two halves of graph_add_node: a node that is not in the graph yet, and putting it there. `name` is not copied. */
MUST_USE status graph_make_node(graph *g, const struct op_def *op, const char *name, const attr *attrs, int n_in,
                                value *const *in, int n_out, node **out);
void graph_insert_node(graph *g, node *n);

/* The size that `v`, an int64 scalar, holds when this plan runs. E_PENDING when it has to be found by running first. */
MUST_USE status graph_data_size(graph *g, value *v, int64_t *size);

/* Emits operator `op` (default domain first, then ours): inference, simplification, constant folding, reuse of an
 * equal node. `in` may hold NULL for absent operands; out[0..n_out) receives the results (NULL where not produced). */
MUST_USE status graph_emit(graph *g, const char *op, const attr *attrs, int n_in, value *const *in, int n_out,
                           value **out);
/* The same from a record. */
MUST_USE status graph_emit_op(graph *g, const struct op_def *op, const attr *attrs, int n_in, value *const *in,
                              int n_out, value **out);

/* TRY(emit(g, &y, "Mul", a, b));  TRY(emit_with(g, &y, "Softmax", NODE_ATTRS(INT("axis", -1)), x)); */
#define emit_with(g, out, op, attrs, ...)                                                                              \
    graph_emit((g), (op), (attrs), (int)(sizeof((value *[]){__VA_ARGS__}) / sizeof(value *)),                          \
               (value *[]){__VA_ARGS__}, 1, (out))
#define emit(g, out, op, ...) emit_with(g, out, op, NULL, __VA_ARGS__)

/* --- changing ----------------------------------------------------------------------------------------------------- */

/* Every use of `from`, and every place in outputs, writes and gradients, becomes `to`. */
MUST_USE status graph_replace(graph *g, value *from, value *to);
/* Removes nodes that nothing needs. */
void graph_remove_dead(graph *g);
/* Numbers the values that are left from 0 on, so that a list with a place for each is no longer than it has to be: of ten
 * nodes that passes make one is left. */
void graph_renumber(graph *g);
void graph_set_operand(graph *g, node *n, int index, value *v);
/* One of the graph's outputs, gradients of inputs or writes, `*at`, becomes `v` (NULL: none). */
MUST_USE status graph_set_end(graph *g, value **at, value *v);
/* Moves `n` in program order, before another node (NULL: to the end). The caller keeps the order topological. */
void graph_move(graph *g, node *n, node *before);
/* Sets every node's mark: whether forward computes it, only backward, or neither. */
enum { PHASE_NONE, PHASE_BACKWARD, PHASE_FORWARD };
void graph_mark_phases(graph *g);
/* False where no node of this operator has ever been in the graph. */
bool graph_has_made(const graph *g, const char *op);
/* Bytes of all gradients where a run may have them in its arena, or 0. */
int64_t graph_gradients_in_arena(const graph *g);

/* --- asking ------------------------------------------------------------------------------------------------------- */

const attr *node_attr(const node *n, const char *name); /* the node's, else the record's default, else NULL */
int64_t node_int(const node *n, const char *name);      /* 0 when there is neither value nor default */
double node_float(const node *n, const char *name);
const char *node_string(const node *n, const char *name);
/* Number of values; *out points to them. -1 when the attribute is absent. */
int node_ints(const node *n, const char *name, const int64_t **out);
bool node_has(const node *n, const char *name); /* set on the node itself */
/* E_UNSUPPORTED, E_INVALID unless the record knows the attribute, and as one of this kind. */
MUST_USE status attr_check(ctx *c, const struct op_def *op, const attr *a);

/* Does `a` come before `b` in program order? */
static inline bool node_is_before(const node *a, const node *b) { return a->place < b->place; }
/* The first node in program order that reads `v`; NULL: there is none. */
node *value_first_reader(const value *v);
/* Is `v` among what the graph gives back: outputs, writes, gradients? */
static inline bool value_is_end(const value *v) { return v->n_ends > 0; }
/* Bytes of its elements. */
static inline int64_t value_bytes(const value *v) { return shape_count(&v->shape) * (int64_t)dtype_size(v->type); }
/* Does anything need `v`? */
static inline bool value_is_read(const value *v) { return v->n_uses > 0 || value_is_end(v); }
/* Is one operand of one node all that sees `v`? */
static inline bool value_is_private(const value *v) { return v->n_uses == 1 && !value_is_end(v); }
static inline value *node_in(const node *n, int i) { return i < n->n_in ? n->in[i] : NULL; }
static inline bool value_is_constant(const value *v) { return v && v->data; }
/* E_DATA, with a sentence that names the operand, unless its elements are known while the graph is made. Where it is an
 * operand of the node that is emitted, emit finds its numbers, as sizes that data decides, and goes on with these. */
MUST_USE status value_known(graph *g, value *v, const char *what);
/* A constant integer tensor as int64; `*count` elements. E_DATA as from value_known. */
MUST_USE status value_ints(graph *g, value *v, const char *what, int *count, const int64_t **out);
/* True when all elements of `v` are known to equal one number: it is a constant, or one that is repeated, or moved. */
bool value_is_filled(const value *v, double *x);

/* Checks every invariant (uses, order, ids, types and shapes agree with inference); E_INVALID names the node. */
MUST_USE status graph_verify(graph *g);
/* One node a line, into the arena. */
MUST_USE status graph_print(graph *g, const char **out);

#endif
