/* rotary_fusion.c -- x * cos + concat(-x2, x1) * sin, x1 and x2 the halves of x's last axis  ->  Rotary, before a transpose of x */
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

static bool along_last_axis(const node *n) {
    int64_t axis = node_int(n, "axis");
    return axis == -1 || axis == n->out[0]->shape.rank - 1;
}

#define FIRST OP_WHERE(is_first, "StridedSlice", VAR(X))
#define SECOND OP_WHERE(is_second, "StridedSlice", VAR(X))
#define TURNED OP_WHERE(along_last_axis, "Concat", OP("Neg", SECOND), FIRST)

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
static status emit_rotary(graph *g, value *x, value *cos, value *sin, value **out) {
    const int64_t *axes;
    const int rank = x->shape.rank;
    int perm[MAX_RANK];

    if (!value_is(x, "Transpose") || node_ints(x->def, "perm", &axes) != rank || axes[rank - 1] != rank - 1)
        return emit(g, out, "Rotary", x, cos, sin);
    for (int i = 0; i < rank; i++) perm[i] = (int)axes[i];
    TRY(turn_back(g, cos, perm, rank, &cos));
    TRY(turn_back(g, sin, perm, rank, &sin));
    TRY(emit(g, out, "Rotary", x->def->in[0], cos, sin));
    return emit_transpose(g, *out, perm, out);
}

static status to_rotary(graph *g, value *const v[], const node *root, value **out) {
    shape all;

    if (v[COS]->needs_grad || v[SIN]->needs_grad) return OK;
    TRY(shape_broadcast(g->c, &v[COS]->shape, &v[SIN]->shape, &all));
    TRY(shape_broadcast(g->c, &all, &v[X]->shape, &all));
    if (!shape_equal(&all, &v[X]->shape) || v[COS]->type != v[X]->type || v[SIN]->type != v[X]->type) return OK;
    (void)root;
    return emit_rotary(g, v[X], v[COS], v[SIN], out);
}

static const rule rules[] = {
    {OP("Add", OP("Mul", TURNED, VAR(SIN)), OP("Mul", VAR(X), VAR(COS))), to_rotary},
    {0},
};

const pass_def rotary_fusion = {.name = "rotary_fusion", .stage = BEFORE_GRADIENT, .level = 1, .rules = rules};
