/* draw.c -- draws a model twice at once: specialised, to know what is accepted and its shapes, and as a model. */
#include "draw.h"

#include "ops/op.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_VALUES = 256, MOST_OPS = 512, MOST_IN = 8, MOST_OUT = 4, TRIES = 90, MOST_ELEMENTS = 4096 };

/* A value in both graphs. */
typedef struct pair {
    value *special, *model;
} pair;

typedef struct maker {
    graph *special, *model;
    choices *from;
    int64_t largest;
    drawn *out;
    pair values[MOST_VALUES];
    int n_values, n_nodes;
    dtype type; /* of floats, unless they are mixed */
    bool mixed;
} maker;

/* Nothing here may fail but for memory. */
static void must(status s) {
    if (s != OK) abort();
}

static unsigned draw(maker *m, unsigned below) { return choose(m->from, below); }

static const op_def *ops[MOST_OPS];
static int n_ops;

/* Operators of models. Not those that run code of others. */
__attribute__((constructor)) static void find_ops(void) {
    for (const op_def *const *family = op_families; *family; family++)
        for (const op_def *op = *family; op->name; op++) {
            if (op->domain[0] && !(op->flags & IN_MODELS)) continue;
            if (op->flags & EFFECT || strncmp(op->name, "Python", 6) == 0 || n_ops == MOST_OPS) continue;
            ops[n_ops++] = op;
        }
}

/* --- values -------------------------------------------------------------------------------------------------------- */

static pair keep(maker *m, value *special, value *model) {
    const pair p = {special, model};
    if (special && m->n_values < MOST_VALUES) m->values[m->n_values++] = p;
    return p;
}

static dtype draw_float(maker *m) {
    static const dtype types[] = {F32, F32, F32, F64, BF16, F16};
    return types[draw(m, sizeof types / sizeof *types)];
}

static dtype draw_type(maker *m) {
    static const dtype types[] = {F32, F32, F32, F32, F32, F32, F64, F64, BF16, F16, I64, I64, I32, BOOL, U8, I8};
    const dtype t = types[draw(m, sizeof types / sizeof *types)];
    return dtype_is_float(t) && !m->mixed ? m->type : t;
}

static int64_t draw_size(maker *m) {
    static const int64_t small[] = {1, 2, 3, 4, 5, 8, 16, 2, 3, 1, 7, 4, 6, 33, 0, 2};
    const unsigned i = draw(m, 32);
    if (i < 16 || m->largest <= 64) return small[i % 16];
    return INT64_C(1) << draw(m, 62) & (m->largest * 2 - 1);
}

static shape draw_shape(maker *m) {
    shape s = {.rank = (int)draw(m, 5)};
    const bool similar = m->n_values && draw(m, 3);

    if (similar) { /* to a value that is there: the same, or some last axes, or with axes of 1 */
        s = m->values[draw(m, (unsigned)m->n_values)].special->shape;
        const int cut = (int)draw(m, 3) == 0 ? (int)draw(m, (unsigned)s.rank + 1) : 0;
        memmove(s.dim, s.dim + cut, (size_t)(s.rank - cut) * sizeof *s.dim);
        s.rank -= cut;
        if (s.rank && draw(m, 3) == 0) s.dim[draw(m, (unsigned)s.rank)] = 1;
        return s;
    }
    for (int i = 0; i < s.rank; i++) s.dim[i] = draw_size(m);
    return s;
}

static bool fits(maker *m, const shape *s) {
    ctx c;
    ctx_init(&c);
    return shape_check(&c, s) == OK && (m->largest > 64 || shape_count(s) <= MOST_ELEMENTS);
}

static pair add_input(maker *m, dtype type, const shape *s) {
    const int i = m->model->n_inputs;
    char name[16];
    value *a, *b;

    if (i == MOST_INPUTS || !fits(m, s)) return m->values[0];
    snprintf(name, sizeof name, "x%d", i);
    must(graph_add_input(m->special, name, type, s, &a));
    must(graph_add_input(m->model, name, type, &(shape){.rank = -1}, &b));
    a->needs_grad = dtype_is_float(type) && draw(m, 8) != 7;
    m->out->inputs[i] = (input_spec){.type = type, .shape = *s, .needs_grad = a->needs_grad};
    return keep(m, a, b);
}

static pair add_constant(maker *m, dtype type, const shape *s) {
    static const double numbers[] = {0, 1, -1, 2, 0.5, 3, -2, 1e-5, 4, 0.044715, 1.4142135, -3, 8, 100, 1e30, -1e9};
    value *a, *b;
    uint64_t one = 0;

    if (!fits(m, s) || shape_count(s) > MOST_ELEMENTS) return m->values[0];
    must(graph_add_constant(m->special, type, s, NULL, &a));
    must(graph_add_constant(m->model, type, s, NULL, &b));
    const bool same = draw(m, 2);
    dtype_set_value(type, &one, 0, dtype_is_float(type) ? numbers[draw(m, 16)] : (double)(int)draw(m, 12) - 3);
    for (int64_t i = 0; i < shape_count(s); i++) {
        char *to = (char *)(uintptr_t)a->data + i * (int64_t)dtype_size(type);
        if (!same && i < 8) {
            const unsigned x = draw(m, 16);
            dtype_set_value(type, &one, 0, dtype_is_float(type) ? numbers[x] : (double)(int)x - 3);
        }
        memcpy(to, &one, dtype_size(type));
    }
    memcpy((void *)(uintptr_t)b->data, a->data, (size_t)shape_count(s) * dtype_size(type));
    return keep(m, a, b);
}

static pair number(maker *m, dtype type, double x) {
    value *a, *b;
    must(graph_scalar(m->special, type, x, &a));
    must(graph_scalar(m->model, type, x, &b));
    return (pair){a, b};
}

static pair numbers_of(maker *m, int count, const int64_t *x) {
    value *a, *b;
    must(graph_ints(m->special, count, x, &a));
    must(graph_ints(m->model, count, x, &b));
    return (pair){a, b};
}

static pair draw_value(maker *m) {
    const unsigned n = (unsigned)m->n_values;
    return m->values[draw(m, 2) ? n - 1 - draw(m, n < 4 ? n : 4) : draw(m, n)];
}

/* --- nodes --------------------------------------------------------------------------------------------------------- */

/* False, and nothing is added, where the engine refuses the node for these operands. */
static bool add_node(maker *m, const op_def *op, const attr *attrs, int n_in, const pair *in, int n_out, pair *out) {
    value *a[MOST_IN], *b[MOST_IN], *made[MOST_OUT] = {0};
    node *n;

    for (int i = 0; i < n_in; i++) a[i] = in[i].special, b[i] = in[i].model;
    if (m->n_nodes == MOST_NODES || graph_emit_op(m->special, op, attrs, n_in, a, n_out, made) != OK) {
        m->special->before = NULL;
        m->special->pending = m->special->asked = NULL;
        return false;
    }
    for (int i = 0; i < n_out; i++)
        if (made[i] && m->largest <= 64 && shape_count(&made[i]->shape) > 4 * MOST_ELEMENTS) return false;
    must(graph_add_node(m->model, op, NULL, attrs, n_in, b, n_out, &n));
    m->n_nodes++;
    for (int i = 0; i < n_out; i++) out[i] = keep(m, made[i], n->out[i]);
    return true;
}

static attr draw_attr(maker *m, const attr *known) {
    static const char *const texts[] = {"NOTSET",
                                        "SAME_UPPER",
                                        "SAME_LOWER",
                                        "VALID",
                                        "mean",
                                        "sum",
                                        "none",
                                        "constant",
                                        "reflect",
                                        "edge",
                                        "wrap",
                                        "nearest",
                                        "linear",
                                        "cubic",
                                        "half_pixel",
                                        "asymmetric",
                                        "align_corners",
                                        "pytorch_half_pixel",
                                        "floor",
                                        "ceil",
                                        "round_prefer_floor",
                                        "add",
                                        "mul",
                                        "max",
                                        "min",
                                        "tanh",
                                        "forward",
                                        "reverse",
                                        "bidirectional",
                                        "zeros",
                                        "border",
                                        "reflection",
                                        "bilinear",
                                        "ij,jk->ik",
                                        "bij,bkj->bik",
                                        "i,i->",
                                        "...ij->...ji",
                                        "bhqd,bhkd->bhqk",
                                        "ii->i",
                                        "LEFT",
                                        "RIGHT",
                                        "DCR",
                                        "CRD"};
    static const double floats[] = {0, 1, 0.5, 0.1, 1e-5, -1, 2, 1e-12, 10, 0.9, 1.67, 1e30, -0.5, 3, 0.01, 100};
    attr a = {.name = known->name, .kind = known->kind ? known->kind : known->expected};
    static int64_t ints[4];
    static double more[4];

    a.i = (int)draw(m, 12) - 3;
    if (draw(m, 16) == 15) a.i = (int64_t)draw(m, 256) << draw(m, 56);
    a.f = floats[draw(m, 16)];
    a.s = texts[draw(m, sizeof texts / sizeof *texts)];
    if (a.kind == ATTR_INTS || a.kind == ATTR_FLOATS) a.count = (int)draw(m, 5);
    for (int i = 0; i < a.count; i++) ints[i] = (int)draw(m, 10) - 2, more[i] = floats[draw(m, 16)];
    a.ints = ints;
    a.floats = more;
    if (a.kind == ATTR_TENSOR || !a.kind) a.name = NULL;
    return a;
}

/* An operand: of those that are there, or of types and shapes that operators want. */
static pair draw_operand(maker *m, const op_def *op, int i, const pair *first) {
    const unsigned how = draw(m, 10);
    shape s;

    if (i == 0 || how < 4) return draw_value(m);
    if (how == 4 && i >= op->min_in) return (pair){0};
    if (how == 5) return add_constant(m, I64, &SHAPE((int64_t)draw(m, 5)));
    if (how == 6) return add_constant(m, first->special ? first->special->type : F32, &SCALAR);
    if (how == 7 || !first->special) return add_input(m, draw_type(m), (s = draw_shape(m), &s));
    s = draw(m, 2) ? first->special->shape : draw_shape(m);
    return how == 8 ? add_input(m, first->special->type, &s) : add_constant(m, first->special->type, &s);
}

static void draw_node(maker *m) {
    const op_def *op = ops[(draw(m, 256) << 8 | draw(m, 256)) % (unsigned)n_ops];
    const int most = op->max_in == VARIADIC || op->max_in > MOST_IN ? MOST_IN : op->max_in;
    const int n_in = most > op->min_in ? op->min_in + (int)draw(m, (unsigned)(most - op->min_in) + 1) : most;
    const int most_out = op->max_out == VARIADIC || op->max_out > MOST_OUT ? MOST_OUT : op->max_out;
    const int n_out = most_out > 1 ? 1 + (int)draw(m, (unsigned)most_out) : 1;
    int64_t ints[4][4];
    double floats[4][4];
    pair in[MOST_IN] = {{0}}, out[MOST_OUT];
    attr attrs[5] = {{0}};
    int n_attrs = 0;

    for (int i = 0; i < n_in; i++) in[i] = draw_operand(m, op, i, &in[0]);
    for (const attr *a = op->attrs; a && a->name && n_attrs < 4; a++) {
        if (a->kind && draw(m, 3)) continue;
        attr *to = &attrs[n_attrs];
        *to = draw_attr(m, a);
        if (!to->name) continue;
        to->ints = memcpy(ints[n_attrs], to->ints, sizeof *ints);
        to->floats = memcpy(floats[n_attrs], to->floats, sizeof *floats);
        n_attrs++;
    }
    attrs[n_attrs] = (attr){.name = NULL};
    (void)add_node(m, op, attrs, n_in, in, n_out, out);
}

/* --- compositions: what exporters write, in a few forms ------------------------------------------------------------- */

static bool apply(maker *m, pair *out, const char *op, const attr *attrs, int n_in, const pair *in) {
    return add_node(m, op_find("", op, 18), attrs, n_in, in, 1, out);
}

#define APPLY_WITH(m, out, op, attrs, ...)                                                                             \
    apply(m, out, op, attrs, (int)(sizeof((pair[]){__VA_ARGS__}) / sizeof(pair)), (pair[]){__VA_ARGS__})
#define APPLY(m, out, op, ...) APPLY_WITH(m, out, op, NULL, __VA_ARGS__)

static int64_t last_axis(const value *v) { return v->shape.rank ? v->shape.dim[v->shape.rank - 1] : 1; }

static bool product(maker *m, pair x, pair *y) {
    const dtype type = x.special->type;
    const int64_t width = last_axis(x.special), wide = draw_size(m);
    const bool turned = draw(m, 2);
    pair w = add_input(m, type, turned ? &SHAPE(wide, width) : &SHAPE(width, wide)), b;

    if (turned && !APPLY_WITH(m, &w, "Transpose", NODE_ATTRS(INTS("perm", 2, ((int64_t[]){1, 0}))), w)) return false;
    if (!APPLY(m, y, "MatMul", x, w)) return false;
    if (!draw(m, 2)) return true;
    b = add_input(m, type, &SHAPE(wide));
    return draw(m, 2) ? APPLY(m, y, "Add", *y, b) : APPLY(m, y, "Add", b, *y);
}

static bool gelu(maker *m, pair x, pair *y) {
    const dtype type = x.special->type;
    pair t;

    if (draw(m, 2)) {
        return APPLY(m, &t, "Div", x, number(m, type, 1.4142135623730951)) && APPLY(m, &t, "Erf", t) &&
               APPLY(m, &t, "Add", t, number(m, type, 1)) && APPLY(m, &t, "Mul", x, t) &&
               APPLY(m, y, "Mul", t, number(m, type, 0.5));
    }
    return APPLY(m, &t, "Pow", x, number(m, type, 3)) && APPLY(m, &t, "Mul", t, number(m, type, 0.044715)) &&
           APPLY(m, &t, "Add", x, t) && APPLY(m, &t, "Mul", t, number(m, type, sqrt(2 / 3.14159265358979323846))) &&
           APPLY(m, &t, "Tanh", t) && APPLY(m, &t, "Add", t, number(m, type, 1)) &&
           APPLY(m, y, "Mul", x, number(m, type, 0.5)) && APPLY(m, y, "Mul", *y, t);
}

static bool gated(maker *m, pair x, pair *y) {
    pair s;
    if (!APPLY(m, &s, "Sigmoid", x) || !APPLY(m, y, "Mul", x, s)) return false;
    return !draw(m, 2) || APPLY(m, y, "Mul", *y, draw_value(m));
}

static bool norm(maker *m, pair x, pair *y) {
    const dtype type = x.special->type;
    const attr *last = NODE_ATTRS(INTS("axes", 1, ((int64_t[]){-1})));
    pair d = x, v, scale = add_input(m, type, &SHAPE(last_axis(x.special)));
    const op_def *mean = op_find("", "ReduceMean", 13);

    if (draw(m, 3) == 0) return APPLY(m, y, "LayerNormalization", x, scale);
    if (draw(m, 2)) {
        if (!add_node(m, mean, last, 1, &x, 1, &v) || !APPLY(m, &d, "Sub", x, v)) return false;
    }
    return APPLY(m, &v, "Pow", d, number(m, type, 2)) && add_node(m, mean, last, 1, (pair[]){v}, 1, &v) &&
           APPLY(m, &v, "Add", v, number(m, type, 1e-5)) && APPLY(m, &v, "Sqrt", v) && APPLY(m, &v, "Div", d, v) &&
           APPLY(m, y, "Mul", v, scale);
}

/* softmax(x x' / s + mask) x */
static bool attention(maker *m, pair x, pair *y) {
    const shape s = x.special->shape;
    const dtype type = x.special->type;
    int64_t perm[MAX_RANK];
    pair k, p, mask, nan;

    if (s.rank < 2) return false;
    for (int i = 0; i < s.rank; i++) perm[i] = i;
    perm[s.rank - 1] = s.rank - 2;
    perm[s.rank - 2] = s.rank - 1;
    if (!APPLY_WITH(m, &k, "Transpose", NODE_ATTRS(INTS("perm", s.rank, perm)), x) || !APPLY(m, &p, "MatMul", x, k) ||
        !APPLY(m, &p, "Mul", p, number(m, type, 0.25)))
        return false;
    if (draw(m, 2)) {
        mask = add_input(m, BOOL, &SHAPE(s.dim[s.rank - 2], s.dim[s.rank - 2]));
        if (draw(m, 2)) {
            if (!APPLY(m, &mask, "Where", mask, number(m, type, 0), number(m, type, -1e9)) ||
                !APPLY(m, &p, "Add", p, mask))
                return false;
        } else if (!APPLY(m, &p, "Where", mask, p, number(m, type, -INFINITY))) {
            return false;
        }
    }
    if (!APPLY_WITH(m, &p, "Softmax", NODE_ATTRS(INT("axis", -1)), p)) return false;
    if (draw(m, 2) && (!APPLY(m, &nan, "IsNaN", p) || !APPLY(m, &p, "Where", nan, number(m, type, 0), p))) return false;
    return APPLY(m, y, "MatMul", p, x);
}

static bool embedding(maker *m, pair x, pair *y) {
    const int64_t width = last_axis(x.special);
    pair table = add_input(m, m->type, &SHAPE(8, width)), ids = add_input(m, I64, &SHAPE(draw_size(m), draw_size(m)));
    return APPLY(m, y, "Gather", table, ids);
}

static bool loss(maker *m, pair x, pair *y) {
    const int64_t width = last_axis(x.special);
    pair flat, labels;

    if (!APPLY(m, &flat, "Reshape", x, numbers_of(m, 2, (int64_t[]){-1, width}))) return false;
    labels = add_input(m, I64, &SHAPE(flat.special->shape.dim[0]));
    return APPLY_WITH(m, y, "SoftmaxCrossEntropyLoss", NODE_ATTRS(INT("ignore_index", draw(m, 2) ? 0 : -100)), flat,
                      labels);
}

/* Heads: [.., n * d] as [.., n, d] with two axes exchanged. */
static bool heads(maker *m, pair x, pair *y) {
    const shape s = x.special->shape;
    int64_t perm[] = {0, 2, 1, 3}, sizes[] = {0, 0, 2, -1};

    if (s.rank != 3) return false;
    return APPLY(m, y, "Reshape", x, numbers_of(m, 4, sizes)) &&
           APPLY_WITH(m, y, "Transpose", NODE_ATTRS(INTS("perm", 4, perm)), *y);
}

static bool halves(maker *m, pair x, pair *y) {
    const op_def *split = op_find("", "Split", 18);
    pair two[2], z;

    if (!add_node(m, split, NODE_ATTRS(INT("axis", -1), INT("num_outputs", 2)), 1, &x, 2, two)) return false;
    if (draw(m, 2)) { /* rotated */
        if (!APPLY(m, &z, "Neg", two[1])) return false;
        return APPLY_WITH(m, y, "Concat", NODE_ATTRS(INT("axis", -1)), z, two[0]);
    }
    return APPLY(m, &z, "Tanh", two[0]) && APPLY(m, y, "Mul", z, two[1]);
}

static bool (*const compositions[])(maker *, pair, pair *) = {product,   gelu, gated, norm,  attention,
                                                              embedding, loss, heads, halves};

static void draw_composition(maker *m) {
    pair x = draw_value(m), y;
    bool (*make)(maker *, pair, pair *) = compositions[draw(m, sizeof compositions / sizeof *compositions)];

    if (!x.special || !dtype_is_float(x.special->type) || !make(m, x, &y) || !draw(m, 3)) return;
    (void)APPLY(m, &y, "Add", y, x);
}

void draw_model(ctx *c, choices *from, int64_t largest, drawn *out) {
    maker m = {.from = from, .largest = largest, .out = out};
    shape s;

    memset(out, 0, sizeof *out);
    must(graph_new(c, &m.special));
    must(graph_new(c, &m.model));
    m.special->specialised = true;
    m.special->opset = m.model->opset = 18;
    out->model = m.model;
    out->seed = draw(&m, 256);
    m.type = draw_float(&m);
    m.mixed = draw(&m, 4) == 3;
    (void)add_input(&m, m.type, &SHAPE(1 + (int64_t)draw(&m, 4), 1 + (int64_t)draw(&m, 5), 4 << draw(&m, 3)));
    for (unsigned n = draw(&m, 3); n; n--) (void)add_input(&m, draw_type(&m), (s = draw_shape(&m), &s));
    for (int tries = 0; tries < TRIES && from->at < from->end; tries++)
        if (draw(&m, 3)) draw_node(&m);
        else draw_composition(&m);
    const int n_out = 1 + (int)draw(&m, MOST_OUTPUTS);
    for (int i = 0; i < n_out; i++) {
        pair p = i ? draw_value(&m) : m.values[m.n_values - 1];
        if (p.special->type == DT_NONE) p = m.values[0]; /* a sequence */
        must(graph_add_output(m.model, p.model));
        out->grads[i] = draw(&m, 8) != 7;
    }
}
