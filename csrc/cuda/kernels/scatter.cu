/* scatter.cu -- mirrors ops/movement/scatter.c, and GatherElements and GatherND: ScatterElements and ScatterND
 * that replace or combine.
 *
 * Where updates replace, each destination learns the number of its last one. Where they are combined, they are sorted by
 * destination first (order.cu), in their own order: the thread at the first of a destination's combines all of them. */
#if !defined T && !defined W
#include "cuda/kernels/kernel.h"

typedef struct element_args {
    const void *x, *index;
    void *y;
    int64_t lanes, length, size; /* lanes of the indices, their length; of the axis of what is indexed */
    int64_t dim[8], index_step[8], x_step[8], y_step[8]; /* the lanes' dimensions */
    int64_t index_along, x_along, y_along;               /* strides along the axis */
    int32_t *key;         /* of each update its destination, or lanes * size; sorted when they are combined */
    const int32_t *order; /* the updates sorted by destination */
    int32_t *last;        /* of each destination: the last update, or -1 */
    int32_t rank, index_type, node, how; /* how: a combining (ops/movement/move.h) */
    int32_t from_end, unused;            /* negative indices count from there */
    cuda_fault *fault;
} element_args;

typedef struct row_args {
    const void *index, *updates; /* updates: of y's rows; or what is gathered from */
    void *y;
    int32_t *key, *last; /* as above; a destination is a row */
    const int32_t *order;
    int64_t count, width, rows, size[8], stride[8]; /* indices; words or elements of a row; the indexed dimensions */
    int64_t part, part_rows;                        /* of one batch: indices, rows */
    int32_t depth, index_type, node, how, from_end, unused;
    cuda_fault *fault;
} row_args;

#ifdef ORT_HOST
#include "cuda/kernels/move.h"
#include "cuda/kernels/order.h"
#include "ops/movement/move.h"

kernel_fn gather_elements_cuda, scatter_elements_cuda, scatter_nd_cuda, gather_nd_cuda, gather_nd_grad_cuda;
size_t scatter_elements_cuda_workspace(const node *n), scatter_nd_cuda_workspace(const node *n);
size_t gather_nd_grad_cuda_workspace(const node *n);

/* By the type of what is combined. */
#define COMBINING_KERNELS(f)                                                                                           \
    {[F32] = {#f "_f32"}, [F64] = {#f "_f64"}, [BF16] = {#f "_bf16"}, [F16] = {#f "_f16"}, [I64] = {#f "_i64"},        \
     [I32] = {#f "_i32"}, [I16] = {#f "_i16"}, [I8] = {#f "_i8"},     [U8] = {#f "_u8"}}

static status check_count(ctx *c, int64_t updates, int64_t destinations) {
    return updates <= INT32_MAX && destinations < INT32_MAX
               ? OK
               : fail(c, E_UNSUPPORTED, "more than 2^31 updates or destinations");
}

/* --- elements ----------------------------------------------------------------------------------------------------- */

static status element_args_of(ctx *c, const call *k, const tensor *x, const tensor *y, const tensor *indexed,
                              element_args *out) {
    const tensor *index = &k->in[1];
    element_args a = {.x = x->data, .index = index->data, .y = y->data, .lanes = 1, .length = 1, .size = 1};
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), index->shape.rank, &axis));
    a.index_type = index->type;
    a.node = cuda_named(k->node);
    a.from_end = node_int(k->node, "from_end") != 0;
    a.fault = k->cuda->fault;
    for (int d = 0; d < index->shape.rank; d++) {
        if (d == axis) {
            a.length = index->shape.dim[d];
            a.size = indexed->shape.dim[d];
            a.index_along = index->stride[d];
            a.x_along = x->stride[d];
            a.y_along = y->stride[d];
            continue;
        }
        a.lanes *= a.dim[a.rank] = index->shape.dim[d];
        a.index_step[a.rank] = index->stride[d];
        a.x_step[a.rank] = x->stride[d];
        a.y_step[a.rank++] = y->stride[d];
    }
    *out = a;
    return OK;
}

status gather_elements_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {[1] = {"gather_elements_1"},
                               [2] = {"gather_elements_2"},
                               [4] = {"gather_elements_4"},
                               [8] = {"gather_elements_8"}};
    element_args a;

    TRY(element_args_of(c, k, &k->in[0], &k->out[0], &k->in[0], &a));
    return cuda_launch(c, k, &kernels[dtype_size(k->in[0].type)], geometry_over(a.lanes * a.length, 256, 256), &a);
}

size_t scatter_elements_cuda_workspace(const node *n) {
    const shape *index = &n->in[1]->shape, *x = &n->in[0]->shape;
    const int64_t axis = node_int(n, "axis"), at = axis < 0 ? axis + x->rank : axis;
    int64_t destinations = 1;

    for (int d = 0; d < x->rank; d++) destinations *= d == at ? x->dim[d] : index->dim[d];
    return scatter_combining(n) == COMBINE_NONE ? (size_t)destinations * sizeof(int32_t)
                                                : cuda_order_bytes(shape_count(index));
}

status scatter_elements_cuda(ctx *c, const call *k) {
    static kernel mark = {.name = "mark_elements"}, keys = {.name = "element_keys"};
    static kernel replace[] = {
        [1] = {"put_elements_1"}, [2] = {"put_elements_2"}, [4] = {"put_elements_4"}, [8] = {"put_elements_8"}};
    static kernel combine[DTYPE_COUNT] = COMBINING_KERNELS(combine_elements);
    const dtype type = k->in[0].type;
    cuda_order order;
    element_args a;

    TRY(element_args_of(c, k, &k->in[2], &k->out[0], &k->out[0], &a));
    a.how = scatter_combining(k->node);
    const int64_t count = a.lanes * a.length, destinations = a.lanes * a.size;
    const geometry each = geometry_over(count, 256, 256);
    TRY(check_count(c, count, destinations));
    TRY(cuda_copy(c, k, &k->out[0], &k->in[0]));
    if (count == 0) return OK;
    a.key = a.last = k->work;
    if (a.how == COMBINE_NONE) {
        TRY(cuda_fill(c, k, a.last, 0xff, (size_t)destinations * sizeof *a.last));
        TRY(cuda_launch(c, k, &mark, each, &a));
        return cuda_launch(c, k, &replace[dtype_size(type)], geometry_over(destinations, 256, 256), &a);
    }
    TRY(cuda_launch(c, k, &keys, each, &a));
    TRY(cuda_order_by(c, k, k->work, count, destinations + 1, &order));
    a.key = order.key;
    a.order = order.index;
    return cuda_launch(c, k, &combine[type], each, &a);
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* `x` is indexed behind its first `batch` dimensions, which the indices have, too. */
static row_args row_args_of(const node *n, const shape *x, int batch) {
    const shape *index = &n->in[1]->shape;
    row_args a = {.part_rows = 1, .depth = (int32_t)index->dim[index->rank - 1]};

    a.count = shape_span(index, 0, index->rank - 1);
    a.part = shape_span(index, batch, index->rank - 1);
    a.width = shape_span(x, batch + a.depth, x->rank);
    for (int d = a.depth - 1; d >= 0; d--) {
        a.size[d] = x->dim[batch + d];
        a.stride[d] = a.part_rows;
        a.part_rows *= x->dim[batch + d];
    }
    a.rows = a.part_rows * shape_span(x, 0, batch);
    a.node = cuda_named(n);
    a.from_end = node_int(n, "from_end") != 0;
    return a;
}

static void set_memory(row_args *a, const call *k, const void *updates) {
    a->index = k->in[1].data;
    a->index_type = k->in[1].type;
    a->updates = updates;
    a->y = k->out[0].data;
    a->key = a->last = k->work;
    a->fault = k->cuda->fault;
}

status gather_nd_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {
        [1] = {"gather_rows_1"}, [2] = {"gather_rows_2"}, [4] = {"gather_rows_4"}, [8] = {"gather_rows_8"}};
    row_args a = row_args_of(k->node, &k->in[0].shape, (int)node_int(k->node, "batch_dims"));

    set_memory(&a, k, k->in[0].data);
    return cuda_launch(c, k, &kernels[dtype_size(k->in[0].type)], geometry_over(a.count * a.width, 256 * 4, 256), &a);
}

static status combine_rows(ctx *c, const call *k, row_args *a) {
    static kernel keys = {.name = "row_keys"}, combine[DTYPE_COUNT] = COMBINING_KERNELS(combine_rows);
    cuda_order order;

    if (a->count == 0 || a->width == 0) return OK;
    TRY(check_count(c, a->count, a->rows));
    TRY(cuda_launch(c, k, &keys, geometry_over(a->count, 256, 256), a));
    TRY(cuda_order_by(c, k, k->work, a->count, a->rows + 1, &order));
    a->key = order.key;
    a->order = order.index;
    return cuda_launch(c, k, &combine[k->out[0].type], geometry_over(a->count * a->width, 256, 256), a);
}

size_t gather_nd_grad_cuda_workspace(const node *n) {
    const shape *index = &n->in[1]->shape;
    return cuda_order_bytes(shape_span(index, 0, index->rank - 1));
}

status gather_nd_grad_cuda(ctx *c, const call *k) {
    const tensor *dx = &k->out[0];
    row_args a = row_args_of(k->node, &dx->shape, (int)node_int(k->node, "batch_dims"));

    set_memory(&a, k, k->in[0].data);
    a.how = COMBINE_ADD;
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    return combine_rows(c, k, &a);
}

size_t scatter_nd_cuda_workspace(const node *n) {
    const row_args a = row_args_of(n, &n->in[0]->shape, 0);
    return scatter_combining(n) == COMBINE_NONE ? (size_t)a.rows * sizeof(int32_t) : cuda_order_bytes(a.count);
}

status scatter_nd_cuda(ctx *c, const call *k) {
    static kernel mark = {.name = "mark_rows"};
    static kernel replace[] = {[1] = {"put_rows_1"}, [2] = {"put_rows_2"}, [4] = {"put_rows_4"}, [8] = {"put_rows_8"}};
    row_args a = row_args_of(k->node, &k->in[0].shape, 0);

    set_memory(&a, k, k->in[2].data);
    a.how = scatter_combining(k->node);
    TRY(cuda_copy(c, k, &k->out[0], &k->in[0]));
    if (a.how != COMBINE_NONE) return combine_rows(c, k, &a);
    if (a.count == 0 || a.width == 0) return OK;
    TRY(check_count(c, a.count, a.rows));
    TRY(cuda_fill(c, k, a.last, 0xff, (size_t)a.rows * sizeof *a.last));
    TRY(cuda_launch(c, k, &mark, geometry_over(a.count, 256, 256), &a));
    return cuda_launch(c, k, &replace[dtype_size(k->in[0].type)], geometry_over(a.rows * a.width, 256 * 4, 256), &a);
}
#endif

#ifdef ORT_DEVICE
typedef struct lane_at {
    int64_t index, x, y;
} lane_at;

DEVICE lane_at lane_of(const element_args *a, int64_t lane) {
    lane_at at = {0, 0, 0};
    for (int d = a->rank - 1; d >= 0; d--) {
        const int64_t i = lane % a->dim[d];
        lane /= a->dim[d];
        at.index += i * a->index_step[d];
        at.x += i * a->x_step[d];
        at.y += i * a->y_step[d];
    }
    return at;
}

/* The place along the axis; -1, reported, where there is none. */
DEVICE int64_t place_of(const element_args *a, int64_t at) {
    const int64_t given = integer_at(a->index, a->index_type, at);
    const int64_t i = given < 0 && a->from_end ? given + a->size : given;
    if (i >= 0 && i < a->size) return i;
    report(a->fault, FAULT_INDEX, a->node, given, a->size);
    return -1;
}

/* The row that an index says; -1 where it says none. */
DEVICE int64_t row_of(const row_args *a, int64_t k) {
    int64_t row = k / a->part * a->part_rows;
    for (int d = 0; d < a->depth; d++) {
        const int64_t given = integer_at(a->index, a->index_type, k * a->depth + d);
        const int64_t i = given < 0 && a->from_end ? given + a->size[d] : given;
        if (i < 0 || i >= a->size[d]) return -1;
        row += i * a->stride[d];
    }
    return row;
}

DEVICE void report_row(const row_args *a, int64_t k) {
    for (int d = 0; d < a->depth; d++) {
        const int64_t given = integer_at(a->index, a->index_type, k * a->depth + d);
        if (given < (a->from_end ? -a->size[d] : 0) || given >= a->size[d])
            report(a->fault, FAULT_INDEX, a->node, given, a->size[d]);
    }
}

/* Where update e goes, among lanes * size destinations; as many where it goes nowhere. */
DEVICE int64_t destination_of(const element_args *a, int64_t e) {
    const int64_t lane = e / a->length, j = e % a->length;
    const int64_t i = place_of(a, lane_of(a, lane).index + j * a->index_along);
    return i < 0 ? a->lanes * a->size : lane * a->size + i;
}

/* The largest number does not depend on which comes first. */
KERNEL(mark_elements, element_args) {
    FOR_EACH(e, a.lanes * a.length) {
        const int64_t to = destination_of(&a, e);
        if (to < a.lanes * a.size) atomicMax(&a.last[to], (int32_t)e);
    }
}

KERNEL(mark_rows, row_args) {
    FOR_EACH(k, a.count) {
        const int64_t row = row_of(&a, k);
        if (row < 0) report_row(&a, k);
        else atomicMax(&a.last[row], (int32_t)k);
    }
}

KERNEL(element_keys, element_args) { FOR_EACH(e, a.lanes * a.length) a.key[e] = (int32_t)destination_of(&a, e); }

KERNEL(row_keys, row_args) {
    FOR_EACH(k, a.count) {
        const int64_t row = row_of(&a, k);
        if (row < 0) report_row(&a, k);
        a.key[k] = (int32_t)(row < 0 ? a.rows : row);
    }
}

/* As in ops/movement/move.h. */
enum { COMBINE_NONE, COMBINE_ADD, COMBINE_MUL, COMBINE_MAX, COMBINE_MIN };

#define TEMPLATE "cuda/kernels/scatter.cu"
#include "cuda/kernels/each_word.h"

/* U is an A whose overflow is defined. */
#define U A
#define TEMPLATE "cuda/kernels/scatter.cu"
#include "cuda/kernels/each_float.h"
#undef U
#define U uint64_t
#define TEMPLATE "cuda/kernels/scatter.cu"
#include "cuda/kernels/each_integer.h"
#endif

#elif defined W /* the template for words */

KERNEL(NAME(gather_elements), element_args) {
    FOR_EACH(e, a.lanes * a.length) {
        const lane_at at = lane_of(&a, e / a.length);
        const int64_t j = e % a.length, i = place_of(&a, at.index + j * a.index_along);
        ((W *)a.y)[at.y + j * a.y_along] = i < 0 ? (W) ~(W)0 : ((const W *)a.x)[at.x + i * a.x_along];
    }
}

KERNEL(NAME(put_elements), element_args) {
    FOR_EACH(to, a.lanes * a.size) {
        const int32_t e = a.last[to];
        if (e >= 0)
            ((W *)a.y)[lane_of(&a, to / a.size).y + to % a.size * a.y_along] =
                ((const W *)a.x)[lane_of(&a, e / a.length).x + e % a.length * a.x_along];
    }
}

KERNEL(NAME(put_rows), row_args) {
    FOR_EACH(e, a.rows * a.width) {
        const int32_t k = a.last[e / a.width];
        if (k >= 0) ((W *)a.y)[e] = ((const W *)a.updates)[k * a.width + e % a.width];
    }
}

KERNEL(NAME(gather_rows), row_args) {
    FOR_EACH(e, a.count * a.width) {
        const int64_t row = row_of(&a, e / a.width);
        if (row < 0) report_row(&a, e / a.width);
        ((W *)a.y)[e] = row < 0 ? (W) ~(W)0 : ((const W *)a.updates)[row * a.width + e % a.width];
    }
}

#else /* the template for numbers */

DEVICE A NAME(take)(int how, A x, A y) {
    return how == COMBINE_ADD   ? (A)((U)x + (U)y)
           : how == COMBINE_MUL ? (A)((U)x * (U)y)
           : how == COMBINE_MAX ? (x > y || IS_NAN(x) ? x : y)
                                : (x < y || IS_NAN(x) ? x : y);
}

KERNEL(NAME(combine_elements), element_args) {
    FOR_EACH(first, a.lanes * a.length) {
        const int64_t to = a.key[first];
        if ((first > 0 && a.key[first - 1] == to) || to == a.lanes * a.size) continue;
        T *y = (T *)a.y + lane_of(&a, to / a.size).y + to % a.size * a.y_along;
        A total = GET(*y);
        for (int64_t j = first; j < a.lanes * a.length && a.key[j] == to; j++) {
            const int64_t e = a.order[j];
            const int64_t at = lane_of(&a, e / a.length).x + e % a.length * a.x_along;
            total = NAME(take)(a.how, total, GET(((const T *)a.x)[at]));
        }
        *y = PUT(total);
    }
}

/* A thread has a column. */
KERNEL(NAME(combine_rows), row_args) {
    FOR_EACH(i, a.count * a.width) {
        const int64_t first = i / a.width, column = i % a.width, row = a.key[first];
        if ((first > 0 && a.key[first - 1] == row) || row == a.rows) continue;
        T *y = (T *)a.y + row * a.width + column;
        A total = GET(*y);
        for (int64_t j = first; j < a.count && a.key[j] == row; j++)
            total = NAME(take)(a.how, total, GET(((const T *)a.updates)[a.order[j] * a.width + column]));
        *y = PUT(total);
    }
}
#endif
