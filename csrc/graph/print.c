/* print.c -- prints a graph as text, for people and for tests that compare before and after.
 *
 *   input %0 x float32[2, 3] grad
 *   %5 = MatMul(%0 x, %1 w) float32[2, 4]  ; /fc1
 *   %6 = Softmax(%5, axis=-1) float32[2, 4]  ; /softmax
 *   output %6
 *   backward
 *   %9 = SoftmaxGrad(%7 dy, %6, axis=-1) float32[2, 4]  ; /softmax
 *   grad %0 x <- %12
 *
 * Constants have no line of their own: they stand where they are used, with their elements when there are few. */
#include "ops/op.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { FEW = 8 }; /* elements of a constant that are shown */

/* --- a growing text: the first failure sticks, and is returned by graph_print ------------------------------------- */

typedef struct text {
    ctx *c;
    char *at;
    size_t used, room;
    status failed;
} text;

static void reserve(text *t, size_t more) {
    size_t room = t->room ? t->room : 4096;
    char *at;

    if (t->failed != OK || t->used + more + 1 <= t->room) return;
    while (room < t->used + more + 1) room *= 2;
    t->failed = NEW(t->c, at, room);
    if (t->failed != OK) return;
    if (t->used) memcpy(at, t->at, t->used);
    t->at = at;
    t->room = room;
}

__attribute__((format(printf, 2, 3))) static void put(text *t, const char *format, ...) {
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    reserve(t, length > 0 ? (size_t)length : 0);
    if (t->failed != OK || length < 0) return;
    va_start(args, format);
    vsnprintf(t->at + t->used, t->room - t->used, format, args);
    va_end(args);
    t->used += (size_t)length;
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static void put_type(text *t, dtype type, const shape *s) {
    char dims[SHAPE_TEXT];
    if (type != DT_NONE) put(t, "%s", dtype_name(type));
    if (s->rank >= 0) put(t, "%s", shape_text(s, dims));
    else if (type == DT_NONE) put(t, "?");
}

static void put_element(text *t, dtype type, const void *data, int64_t i) {
    if (type == BOOL) put(t, "%s", dtype_get_int(type, data, i) ? "true" : "false");
    else if (dtype_is_float(type)) put(t, "%.*g", type == F64 ? 17 : 9, dtype_get(type, data, i));
    else put(t, "%" PRId64, dtype_get_int(type, data, i));
}

/* 2.5 or [1, 2] as they are; others with their type: float32[768] of 0, float32[30, 30] of ... */
static void put_elements(text *t, dtype type, const shape *s, const void *data) {
    int64_t count = shape_count(s);

    if (count > FEW || s->rank > 1) {
        put_type(t, type, s);
        put(t, " of ");
    }
    if (count > FEW) {
        put(t, "...");
        return;
    }
    if (s->rank) put(t, "[");
    for (int64_t i = 0; i < count; i++) {
        if (i) put(t, ", ");
        put_element(t, type, data, i);
    }
    if (s->rank) put(t, "]");
}

static void put_constant(text *t, const value *v) {
    double x;

    if (shape_count(&v->shape) <= FEW || !value_is_filled(v, &x)) {
        put_elements(t, v->type, &v->shape, v->data);
        return;
    }
    put_type(t, v->type, &v->shape);
    put(t, " of ");
    put_element(t, v->type, v->data, 0);
}

static void put_value(text *t, const value *v) {
    if (!v) put(t, "-");
    else if (v->data) put_constant(t, v);
    else put(t, v->name ? "%%%d %s" : "%%%d", v->id, v->name);
}

static void put_attr(text *t, const attr *a) {
    put(t, "%s=", a->name);
    switch (a->kind) {
    case ATTR_INT: put(t, "%" PRId64, a->i); break;
    case ATTR_FLOAT: put(t, "%.9g", a->f); break;
    case ATTR_STRING: put(t, "\"%s\"", a->s); break;
    case ATTR_INTS:
    case ATTR_FLOATS:
        put(t, "[");
        for (int i = 0; i < a->count; i++) {
            if (i) put(t, ", ");
            if (a->kind == ATTR_INTS) put(t, "%" PRId64, a->ints[i]);
            else put(t, "%.9g", a->floats[i]);
        }
        put(t, "]");
        break;
    case ATTR_TENSOR: put_elements(t, a->t->type, &a->t->shape, a->t->data); break;
    }
}

static void put_node(text *t, const node *n) {
    const char *comma = "";

    for (int i = 0; i < n->n_out; i++) {
        if (i) put(t, ", ");
        if (n->out[i]) put(t, "%%%d", n->out[i]->id);
        else put(t, "-");
    }
    put(t, " = %s(", n->op->name);
    for (int i = 0; i < n->n_in; i++, comma = ", ") {
        put(t, "%s", comma);
        put_value(t, n->in[i]);
    }
    for (const attr *a = n->attrs; a && a->name; a++, comma = ", ") {
        put(t, "%s", comma);
        put_attr(t, a);
    }
    put(t, ")");
    for (int i = 0; i < n->n_out; i++) {
        if (!n->out[i] || n->out[i]->type == DT_NONE) continue;
        put(t, i ? ", " : " ");
        put_type(t, n->out[i]->type, &n->out[i]->shape);
    }
    if (n->name) put(t, "  ; %s", n->name);
    put(t, "\n");
}

static void put_pair(text *t, const char *what, const value *to, const value *from) {
    put(t, "%s ", what);
    put_value(t, to);
    put(t, " <- ");
    put_value(t, from);
    put(t, "\n");
}

/* --- the whole ---------------------------------------------------------------------------------------------------- */

status graph_print(graph *g, const char **out) {
    text t = {.c = g->c};
    bool backward = false;

    for (int i = 0; i < g->n_inputs; i++) {
        put(&t, "input ");
        put_value(&t, g->inputs[i]);
        put(&t, " ");
        put_type(&t, g->inputs[i]->type, &g->inputs[i]->shape);
        put(&t, g->inputs[i]->needs_grad ? " grad\n" : "\n");
    }
    for (const node *n = g->first; n; n = n->next) {
        if (n->backward != backward) put(&t, n->backward ? "backward\n" : "forward\n");
        backward = n->backward;
        put_node(&t, n);
    }
    for (int i = 0; i < g->n_outputs; i++) {
        put(&t, "output ");
        put_value(&t, g->outputs[i]);
        put(&t, "\n");
    }
    for (const state_write *w = g->writes; w; w = w->next) put_pair(&t, "write", w->input, w->value);
    for (int i = 0; i < g->n_input_grads; i++)
        if (g->input_grads[i]) put_pair(&t, "grad", g->inputs[i], g->input_grads[i]);
    put(&t, "%s", "");
    *out = t.at;
    return t.failed;
}
