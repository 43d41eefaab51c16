/* shape.c -- does arithmetic of shapes and strides. */
#include "core/shape.h"

#include "core/size.h"

#include <inttypes.h>
#include <stdio.h>

int64_t shape_count(const shape *s) { return shape_span(s, 0, s->rank); }

int64_t shape_span(const shape *s, int from, int to) {
    int64_t n = 1;
    for (int i = from; i < to; i++) n = size_mul(n, s->dim[i]);
    return n;
}

bool shape_equal(const shape *a, const shape *b) {
    if (a->rank != b->rank) return false;
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] != b->dim[i]) return false;
    return true;
}

const char *shape_text(const shape *s, char text[SHAPE_TEXT]) {
    int used = snprintf(text, SHAPE_TEXT, s->rank < 0 ? "[?" : "[");
    for (int i = 0; i < s->rank && used < SHAPE_TEXT; i++)
        used += snprintf(text + used, (size_t)(SHAPE_TEXT - used), "%s%" PRId64, i ? ", " : "", s->dim[i]);
    if (used < SHAPE_TEXT) snprintf(text + used, (size_t)(SHAPE_TEXT - used), "]");
    return text;
}

status shape_check(ctx *c, const shape *s) {
    const int64_t limit = INT64_C(1) << 47;
    int64_t n = 1; /* without the sizes of 0: strides are made of the others */

    if (s->rank < 0 || s->rank > MAX_RANK)
        return fail(c, E_UNSUPPORTED, "a tensor of rank %d; at most %d are supported", s->rank, MAX_RANK);
    for (int i = 0; i < s->rank; i++) {
        if (s->dim[i] < 0) return fail(c, E_SHAPE, "dimension %d has the negative size %" PRId64, i, s->dim[i]);
        if (s->dim[i] && (n = size_mul(n, s->dim[i])) > limit)
            return fail(c, E_NOMEM, "a tensor of more than 2^47 elements");
    }
    return OK;
}

status shape_broadcast(ctx *c, const shape *a, const shape *b, shape *out) {
    int rank = a->rank > b->rank ? a->rank : b->rank;
    shape r = {.rank = rank};

    for (int i = 1; i <= rank; i++) {
        int64_t x = i <= a->rank ? a->dim[a->rank - i] : 1, y = i <= b->rank ? b->dim[b->rank - i] : 1;
        if (x != y && x != 1 && y != 1) {
            char ta[SHAPE_TEXT], tb[SHAPE_TEXT];
            return fail(c, E_SHAPE,
                        "shapes %s and %s do not broadcast: axis -%d is %" PRId64 " on one side and %" PRId64
                        " on the other",
                        shape_text(a, ta), shape_text(b, tb), i, x, y);
        }
        r.dim[rank - i] = x == 1 ? y : x;
    }
    *out = r;
    return OK;
}

status shape_axis(ctx *c, int64_t axis, int rank, int *out) {
    int64_t limit = rank ? rank : 1;
    if (axis < -limit || axis >= limit)
        return fail(c, E_SHAPE, "axis %" PRId64 " is out of range for a tensor of rank %d", axis, rank);
    *out = (int)(axis < 0 ? axis + limit : axis);
    return OK;
}

void stride_contiguous(const shape *s, int64_t stride[MAX_RANK]) {
    int64_t n = 1;
    for (int i = s->rank - 1; i >= 0; i--) {
        stride[i] = n;
        n *= s->dim[i] > 0 ? s->dim[i] : 1;
    }
}

bool tensor_contiguous(const tensor *t) {
    int64_t n = 1;
    if (tensor_count(t) == 0) return true;
    for (int i = t->shape.rank - 1; i >= 0; i--) {
        if (t->shape.dim[i] != 1 && t->stride[i] != n) return false;
        n *= t->shape.dim[i];
    }
    return true;
}

tensor tensor_expand(const tensor *t, const shape *to) {
    tensor r = {.data = t->data, .type = t->type, .shape = *to};
    int shift = to->rank - t->shape.rank;
    for (int i = 0; i < t->shape.rank; i++) r.stride[i + shift] = t->shape.dim[i] == 1 ? 0 : t->stride[i];
    return r;
}
