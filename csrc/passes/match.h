/* match.h -- patterns of operators, and rules that replace what they match.
 *
 * A pattern is a tree written where it is used; compound literals at file scope make it a compile-time constant:
 *
 *     enum { X };
 *     #define ONE_PLUS_ERF OP("Add", OP("Erf", OP("Div", VAR(X), CONST(1.41421356237))), CONST(1))
 *     {OP("Mul", OP("Mul", VAR(X), ONE_PLUS_ERF), CONST(0.5)), to_gelu}
 *
 * Operands of COMMUTATIVE operators match in either order. The inner nodes of a match are private to it: nothing
 * outside uses their results, so that the rewritten graph does not compute them a second time. */
#ifndef ORT_PASSES_MATCH_H
#define ORT_PASSES_MATCH_H

#include "graph/graph.h"

enum { MAX_CAPTURES = 8, MAX_MATCHED = 24 };

typedef struct pattern pattern;
struct pattern {
    enum { MATCH_OP, MATCH_VAR, MATCH_CONST, MATCH_ANYCONST, MATCH_EITHER } kind;
    int slot;                     /* where the value is captured; -1: nowhere */
    const char *op;               /* of the default domain or ours */
    const pattern *const *in;     /* its operands, no others are present; or alternatives. Ended by NULL */
    bool (*where)(const node *n); /* a condition on the operator's attributes; NULL: none */
    bool shared;                  /* others may use the result too */
    double number;
};

#define LIST_(...) ((const pattern *const[]){__VA_ARGS__, NULL})
#define OP_(slot_, where_, shared_, op_, ...)                                                                          \
    (&(const pattern){MATCH_OP, (slot_), (op_), LIST_(__VA_ARGS__), (where_), (shared_), 0})
/* An operator and its operands; its result captured, or its attributes checked. */
#define OP(op_, ...) OP_(-1, NULL, false, op_, __VA_ARGS__)
#define OP_AS(slot_, op_, ...) OP_(slot_, NULL, false, op_, __VA_ARGS__)
#define OP_WHERE(where_, op_, ...) OP_(-1, where_, false, op_, __VA_ARGS__)
/* An operator that may stay for others: its replacement does not compute it again. */
#define OP_SHARED(op_, ...) OP_(-1, NULL, true, op_, __VA_ARGS__)
/* Any value; the same value wherever the same slot stands. */
#define VAR(slot_) (&(const pattern){.kind = MATCH_VAR, .slot = (slot_)})
/* A constant filled with one number (as exactly as its type holds it). */
#define CONST(x_) (&(const pattern){.kind = MATCH_CONST, .slot = -1, .number = (x_)})
/* Any constant. */
#define ANYCONST(slot_) (&(const pattern){.kind = MATCH_ANYCONST, .slot = (slot_)})
#define EITHER(...) (&(const pattern){.kind = MATCH_EITHER, .slot = -1, .in = LIST_(__VA_ARGS__)})

/* Emits what replaces the root's first result into *out, from the captures; leaves it NULL to decline. What was emitted
 * before declining is removed again. A replacement of another type or shape counts as declined. */
typedef status rewrite_fn(graph *g, value *const v[], const node *root, value **out);

typedef struct rule {
    const pattern *pattern; /* its root is an OP; NULL ends a list */
    rewrite_fn *rewrite;
} rule;

/* True when the graph at `root` has the form of `p`; `v` receives the captures, NULL where a slot is not met. */
bool match(const graph *g, const pattern *p, const node *root, value *v[MAX_CAPTURES]);

bool node_is(const node *n, const char *op);
/* Was it computed by this operator? */
bool value_is(const value *v, const char *op);
/* Of a StridedSlice: does it keep all of an axis, in its order? */
bool slice_keeps(const node *n, int axis);
/* A Transpose of [a, b, c, d] to [a, c, b, d]? */
bool node_swaps_middle_axes(const node *n);
/* Its attribute "axis" counted from the front, of so many axes; whether that is the last one of its first operand. */
int node_axis(const node *n, int rank);
bool node_is_along_last_axis(const node *n);
/* Does it look rows of a table up: a Gather along the first axis, or an Embedding? */
bool node_looks_up_rows(const node *n);
/* Does anything need one of its results? */
bool node_is_read(const node *n);
/* True when `n` and one that reads it may be steps of one chain (pointwise_fusion.c). */
bool node_is_read_by_a_chain(const node *n);
/* Is `v`, if it is present, computed before `n`? */
bool value_is_before(const value *v, const node *n);

/* Applies rules to all nodes in program order, the first that matches at a node, until none fires any more.
 * `*fired` counts replacements. */
MUST_USE status rules_apply(graph *g, const rule *rules, int *fired);

#endif
