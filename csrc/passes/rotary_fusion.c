/* rotary_fusion.c -- x * cos + concat(-x2, x1) * sin, x1 and x2 the halves of x's last axis  ->  Rotary, before a transpose of x
 *
 * A 16-bit x that is widened for angles in float32, as under autocast, is read as it is; where the result is rounded again,
 * that is what is stored. It is the result of the single nodes, and its gradient is rounded once where theirs was three
 * times. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { X, COS, SIN };

/* The last axis of one half, the others whole. */
static bool is_half(const node *n, bool second) {
    const shape *s = &n->in[0]->shape;
    const int64_t *starts, *steps;
    const int last = s->rank - 1;

    node_ints(n, "starts", &starts);
    node_ints(n, "steps", &steps);
    if (last < 0 || s->dim[last] % 2 || n->out[0]->shape.dim[last] != s->dim[last] / 2 || steps[last] != 1)
        return false;
    for (int i = 0; i < last; i++)
        if (!slice_keeps(n, i)) return false;
    return starts[last] == (second ? s->dim[last] / 2 : 0);
}

static bool is_first(const node *n) { return is_half(n, false); }
static bool is_second(const node *n) { return is_half(n, true); }

#define FIRST OP_WHERE(is_first, "StridedSlice", VAR(X))
#define SECOND OP_WHERE(is_second, "StridedSlice", VAR(X))
#define TURNED OP_WHERE(node_is_along_last_axis, "Concat", OP("Neg", SECOND), FIRST)
#define SUM_OF(turned, x) OP("Add", OP("Mul", turned, VAR(SIN)), OP("Mul", x, VAR(COS)))

/* The angles as they are before x was transposed. */
static status turn_back(graph *g, value *angles, const int *perm, int rank, value **out) {
    shape s = {.rank = rank};
    int back[MAX_RANK];

    for (int i = 0; i < rank; i++) {
        const int from = i - (rank - angles->shape.rank);
        s.dim[i] = from < 0 ? 1 : angles->shape.dim[from];
        back[perm[i]] = i;
    }
    TRY(emit_reshape(g, angles, &s, out));
    return emit_transpose(g, *out, back, out);
}

/* Rotary(Transpose(x)) as Transpose(Rotary(x)), so that it is one of the operators that work token by token. */
static status emit_rotary(graph *g, value *x, value *cos, value *sin, bool wide, value **out) {
    const int64_t *axes;
    const int rank = x->shape.rank;
    int perm[MAX_RANK];

    if (!value_is(x, "Transpose") || node_ints(x->def, "perm", &axes) != rank || axes[rank - 1] != rank - 1)
        return emit_with(g, out, "Rotary", NODE_ATTRS(INT("wide", wide)), x, cos, sin);
    for (int i = 0; i < rank; i++) perm[i] = (int)axes[i];
    TRY(turn_back(g, cos, perm, rank, &cos));
    TRY(turn_back(g, sin, perm, rank, &sin));
    TRY(emit_with(g, out, "Rotary", NODE_ATTRS(INT("wide", wide)), x->def->in[0], cos, sin));
    return emit_transpose(g, *out, perm, out);
}

/* No gradient reaches the angles, and they do not make x larger. */
static status angles_fit(const graph *g, value *const v[], bool *fit) {
    shape all;

    *fit = false;
    if (v[COS]->needs_grad || v[SIN]->needs_grad || v[COS]->type != v[SIN]->type) return OK;
    TRY(shape_broadcast(g->c, &v[COS]->shape, &v[SIN]->shape, &all));
    TRY(shape_broadcast(g->c, &all, &v[X]->shape, &all));
    *fit = shape_equal(&all, &v[X]->shape);
    return OK;
}

static status to_rotary(graph *g, value *const v[], const node *root, value **out) {
    const bool wide = root->out[0]->type == F32 && dtype_is_narrow(v[X]->type);
    bool fit;

    TRY(angles_fit(g, v, &fit));
    if (!fit || v[COS]->type != root->out[0]->type || (v[X]->type != v[COS]->type && !wide)) return OK;
    return emit_rotary(g, v[X], v[COS], v[SIN], wide, out);
}

/* Rotary(Cast(x)), whose x others do not read in float32. */
static status without_cast(graph *g, value *const v[], const node *root, value **out) {
    if (!dtype_is_narrow(v[X]->type) || node_int(root, "inverse")) return OK;
    return emit_rotary(g, v[X], v[COS], v[SIN], true, out);
}

/* A wide result, turned or not, that is rounded to the type of x: others may go on reading it as it is. */
static status round_itself(graph *g, value *const v[], const node *root, value **out) {
    const node *turn = value_is(v[X], "Transpose") ? v[X]->def : NULL, *n = turn ? turn->in[0]->def : v[X]->def;

    if (!n || !node_is(n, "Rotary") || !node_int(n, "wide") || n->in[0]->type != root->out[0]->type) return OK;
    TRY(emit(g, out, "Rotary", n->in[0], n->in[1], n->in[2]));
    return turn ? emit_transpose_like(g, turn, *out, out) : OK;
}

static const rule rules[] = {
    {SUM_OF(TURNED, VAR(X)), to_rotary},
    {SUM_OF(OP("Cast", TURNED), OP("Cast", VAR(X))), to_rotary},
    {OP("Rotary", OP("Cast", VAR(X)), VAR(COS), VAR(SIN)), without_cast},
    {OP("Cast", VAR(X)), round_itself},
    {0},
};

const pass_def rotary_fusion = {.name = "rotary_fusion", .stage = BEFORE_GRADIENT, .rules = rules};
