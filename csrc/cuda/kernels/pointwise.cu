/* pointwise.cu -- computes every pointwise operator: twin of ops/pointwise/pointwise.c and functions of its families.
 *
 * A thread takes four neighbouring elements at a time. An operand of which these lie together is read in one piece, a
 * single number once, any other element by element through its strides; narrow types are widened on the way. Casts
 * between floats, of whole tensors, have four pieces on their way at a time. An operator of many elements is a chain of
 * one step where NVRTC is there (generate.c): types and strides are written out, it moves 16 bytes at a time. A row of the
 * list of operators, and of those of other types in steps.h, makes the kernels and the table both. */
#include "cuda/kernels/kernel.h"

#include "cuda/kernels/elements.h"
#include "cuda/kernels/steps.h"

enum { OPERANDS = 4, PARAMETERS = 4 };

typedef struct pointwise_args {
    void *out;
    space space;
    int32_t type, unused;
    source in[OPERANDS];
    double param[PARAMETERS];
    cuda_fault *fault;
    int64_t node;
} pointwise_args;

/* --- the host ----------------------------------------------------------------------------------------------------- */

#ifdef ORT_HOST
#include "cuda/host/compile.h"
#include "cuda/host/generate.h"
#include "ops/pointwise/pointwise.h"

#include <string.h>

typedef struct row {
    const char *name;
    kernel kernels[TILE_CLASSES]; /* by the class of the last operand */
    const op_def *_Atomic op;     /* once it was found */
} row;

#define FLOAT_ROW(name_, f, ...) {.name = name_, .kernels = {[TILE_F32] = {#f "_f32"}, [TILE_F64] = {#f "_f64"}}},
#define INT_ROW(name_, f, ...) {.name = name_, .kernels = {[TILE_I64] = {#f "_i64"}, [TILE_I32] = {#f "_i32"}}},
#define NUMBER_ROW(name_, f, ...)                                                                                      \
    {.name = name_,                                                                                                    \
     .kernels = {                                                                                                      \
         [TILE_F32] = {#f "_f32"}, [TILE_F64] = {#f "_f64"}, [TILE_I64] = {#f "_i64"}, [TILE_I32] = {#f "_i32"}}},
#define BOOL_ROW(name_, f, ...) {.name = name_, .kernels = {[TILE_BOOL] = {#f "_bool"}}},

/* An operator may have several rows, for different classes. */
static row floats[] = {
#define FORMULA(op, f, operands, cpu, formula, where) FLOAT_ROW(#op, f, )
#include "ops/pointwise/operators.h"
    FLOAT_TESTS(FLOAT_ROW) COMPARISONS(NUMBER_ROW){.name = "Where",
                                                   .kernels = {[TILE_F32] = {"where_f32"},
                                                               [TILE_F64] = {"where_f64"},
                                                               [TILE_I64] = {"where_i64"},
                                                               [TILE_I32] = {"where_i32"},
                                                               [TILE_BOOL] = {"where_bool"}}}};
static row ints[] = {INT_OPERATORS(INT_ROW) INT_DIVISIONS(INT_ROW)};
static row bools[] = {BOOL_OPERATORS(BOOL_ROW)};

#define CASTS_FROM(f)                                                                                                  \
    {[TILE_F32] = {#f "_to_f32"},                                                                                      \
     [TILE_F64] = {#f "_to_f64"},                                                                                      \
     [TILE_I64] = {#f "_to_i64"},                                                                                      \
     [TILE_I32] = {#f "_to_i32"},                                                                                      \
     [TILE_BOOL] = {#f "_to_bool"}}
static kernel casts[TILE_CLASSES][TILE_CLASSES] = {
    [TILE_F32] = CASTS_FROM(f32), [TILE_F64] = CASTS_FROM(f64),   [TILE_I64] = CASTS_FROM(i64),
    [TILE_I32] = CASTS_FROM(i32), [TILE_BOOL] = CASTS_FROM(bool),
};

static kernel *find_in(row *rows, size_t n, const op_def *op, tile_class class) {
    for (size_t i = 0; i < n; i++) {
        const op_def *known = rows[i].op;
        if (known ? known != op : strcmp(rows[i].name, op->name) != 0) continue;
        rows[i].op = op;
        if (rows[i].kernels[class].name) return &rows[i].kernels[class];
    }
    return NULL;
}

static kernel *find(const op_def *op, tile_class from, tile_class to) {
    if (strcmp(op->name, "Cast") == 0) return &casts[from][to];
    kernel *k = find_in(floats, sizeof floats / sizeof *floats, op, from);
    if (!k) k = find_in(ints, sizeof ints / sizeof *ints, op, from);
    return k ? k : find_in(bools, sizeof bools / sizeof *bools, op, from);
}

static void merge_dimensions(space *a, source *in, int n) {
    int last = -1;

    for (int d = 0; d < a->rank; d++) {
        const int64_t size = a->dim[d];
        bool runs_on = last >= 0;
        if (size == 1) continue;
        for (int i = 0; i < n && runs_on; i++) runs_on = in[i].stride[last] == in[i].stride[d] * size;
        if (runs_on) a->dim[last] *= size;
        else a->dim[++last] = size;
        for (int i = 0; i < n; i++) in[i].stride[last] = in[i].stride[d];
    }
    a->rank = last + 1;
}

static reach reach_of(const space *a, const source *s) {
    bool single = true;
    for (int d = 0; d < a->rank; d++) single = single && s->stride[d] == 0;
    if (single) return SINGLE;
    return a->rank == 1 && s->stride[0] == 1 ? DENSE : STRIDES;
}

void space_of(const tensor *in, int n, const tensor *out, space *to, source *sources) {
    *to = (space){.count = tensor_count(out), .rank = out->shape.rank};
    for (int d = 0; d < to->rank; d++) to->dim[d] = out->shape.dim[d];
    for (int i = 0; i < n; i++) {
        const tensor t = tensor_expand(&in[i], &out->shape);
        sources[i] = (source){.data = t.data, .type = t.type};
        for (int d = 0; d < to->rank; d++) sources[i].stride[d] = t.stride[d];
    }
    merge_dimensions(to, sources, n);
    for (int i = 0; i < n; i++) sources[i].how = reach_of(to, &sources[i]);
}

/* Whether AT_ONCE elements are pieces wherever they are. */
static bool is_even(const tensor *t) { return (uintptr_t)t->data % (AT_ONCE * dtype_size(t->type)) == 0; }

/* Elements from which on a kernel of the operator's own saves more time than its launch takes. */
enum { MANY_ELEMENTS = 1 << 20 };

/* As a chain of one step. *done is false where there is no compiled kernel of it. `a` has the operands, from `from` to
 * `to` is what the step computes. */
static status run_compiled(ctx *c, const call *k, const pointwise_args *a, tile_class from, tile_class to, bool *done) {
    const int kind = chain_step_kind(k->node->op, from, to);
    kernel *compiled = NULL;
    chain_args chain;

    *done = false;
    if (kind < 0 || k->n_in > STEP_OPERANDS) return OK;
    memset(&chain, 0, sizeof chain);
    chain_program *p = &chain.program;
    p->n_in = k->n_in, p->n_steps = p->n_out = 1;
    p->wide = a->space.count > INT32_MAX;
    p->result[0] = (uint8_t)k->n_in, p->result_type[0] = (uint8_t)a->type;
    p->steps[0] = (chain_step){.kind = (uint16_t)kind, .type = (uint8_t)a->type, .out = (uint8_t)k->n_in};
    for (int i = 0; i < k->n_in; i++) {
        p->steps[0].in[i] = (uint8_t)i;
        p->type[i] = (uint8_t)a->in[i].type;
        p->how[i] = (uint8_t)a->in[i].how;
    }
    chain.space = a->space;
    chain.out[0] = a->out;
    memcpy(chain.in, a->in, sizeof a->in);
    memcpy(chain.param[0], a->param, sizeof chain.param[0]);
    const int at_once = chain_at_once(p);
    for (int i = 0; i < k->n_in; i++) p->how[i] = (uint8_t)chain_reach(&a->space, &a->in[i], at_once);
    TRY(chain_compiled(c, k, p, &compiled));
    *done = compiled != NULL;
    if (!compiled) return OK;
    return cuda_launch(c, k, compiled, geometry_over(a->space.count, at_once * 256, 256), &chain);
}

status pointwise_cuda(ctx *c, const call *k) {
    static kernel cast_whole = {.name = "cast_whole"};
    const tensor *out = &k->out[0];
    tile_class from = tile_class_of(k->in[k->n_in - 1].type), to = tile_class_of(out->type);
    kernel *f = find(k->node->op, from, to);
    pointwise_args a = {.out = out->data, .type = out->type, .fault = k->cuda->fault};
    if (!dtype_is_float(out->type)) a.node = cuda_named(k->node); /* integers may be divided by zero */

    if (!f)
        return fail(c, E_UNSUPPORTED, "%s of %s has no CUDA kernel", k->node->op->name,
                    dtype_name(k->in[k->n_in - 1].type));
    space_of(k->in, k->n_in, out, &a.space, a.in);
    if (f == &casts[TILE_F32][TILE_F32] && a.in[0].how == DENSE && is_even(&k->in[0]) && is_even(out))
        return cuda_launch(c, k, &cast_whole, geometry_over(a.space.count, AT_ONCE * PIECES_OF(F32) * 256, 256), &a);
    tile_parameters(k->node, a.param);
    if (a.space.count >= MANY_ELEMENTS) {
        bool done;
        TRY(run_compiled(c, k, &a, from, to, &done));
        if (done) return OK;
    }
    for (int i = 0; i < k->n_in; i++) a.in[i].how = chain_reach(&a.space, &a.in[i], AT_ONCE);
    return cuda_launch(c, k, f, geometry_over(a.space.count, AT_ONCE * 256, 256), &a);
}
#endif

/* --- kernels ------------------------------------------------------------------------------------------------------ */

#ifdef ORT_DEVICE
#ifndef __CUDACC__
#include <tgmath.h> /* as in CUDA, exp and the like are of their argument's type */
#endif

#define LOAD_IN(T, operand, to) load_##T(&a.space, &a.in[operand], a.in[operand].how, a.in[operand].type, i, n, to);
#define LOADS_1(T) LOAD_IN(T, 0, four_x)
#define LOADS_2(T) LOADS_1(T) LOAD_IN(T, 1, four_y)
#define LOADS_3(T) LOADS_2(T) LOAD_IN(T, 2, four_z)
#define LOADS_4(T) LOADS_3(T) LOAD_IN(T, 3, four_w)
#define ELEMENTS_1 const real x = four_x[j];
#define ELEMENTS_2 ELEMENTS_1 const real y = four_y[j];
#define ELEMENTS_3 ELEMENTS_2 const real z = four_z[j];
#define ELEMENTS_4 ELEMENTS_3 const real w = four_w[j];
#define BUFFERS_1(T) T four_x[AT_ONCE];
#define BUFFERS_2(T) BUFFERS_1(T) T four_y[AT_ONCE];
#define BUFFERS_3(T) BUFFERS_2(T) T four_z[AT_ONCE];
#define BUFFERS_4(T) BUFFERS_3(T) T four_w[AT_ONCE];

/* A kernel from k operands of T to R. */
#define POINTWISE(name, k, T, U, R, expr, ...)                                                                         \
    KERNEL(name, pointwise_args) {                                                                                     \
        typedef T real;                                                                                                \
        typedef U word;                                                                                                \
        const real p0 = (real)a.param[0], p1 = (real)a.param[1];                                                       \
        (void)p0, (void)p1, (void)sizeof(word);                                                                        \
        FOR_EACH(group, (a.space.count + AT_ONCE - 1) / AT_ONCE) {                                                     \
            const int64_t i = group * AT_ONCE;                                                                         \
            const int n = a.space.count - i < AT_ONCE ? (int)(a.space.count - i) : AT_ONCE;                            \
            BUFFERS_##k(T) R out[AT_ONCE];                                                                             \
            LOADS_##k(T) for (int j = 0; j < AT_ONCE; j++) {                                                           \
                ELEMENTS_##k __VA_ARGS__;                                                                              \
                out[j] = (R)(expr);                                                                                    \
            }                                                                                                          \
            store_##R(a.out, a.type, i, n, out);                                                                       \
        }                                                                                                              \
    }

#define FLOAT_KERNEL(op, name, k, expr, ...)                                                                           \
    POINTWISE(name##_f32, k, float, float, float, expr, __VA_ARGS__)                                                   \
    POINTWISE(name##_f64, k, double, double, double, expr, __VA_ARGS__)
#define INT_KERNEL(op, name, k, expr, ...)                                                                             \
    POINTWISE(name##_i64, k, int64_t, uint64_t, int64_t, expr, __VA_ARGS__)                                            \
    POINTWISE(name##_i32, k, int32_t, uint32_t, int32_t, expr, __VA_ARGS__)
#define FLOAT_TEST_KERNEL(op, name, k, expr, ...)                                                                      \
    POINTWISE(name##_f32, k, float, float, uint8_t, expr, __VA_ARGS__)                                                 \
    POINTWISE(name##_f64, k, double, double, uint8_t, expr, __VA_ARGS__)
#define COMPARISON_KERNEL(op, name, k, expr, ...)                                                                      \
    FLOAT_TEST_KERNEL(op, name, k, expr, __VA_ARGS__)                                                                  \
    POINTWISE(name##_i64, k, int64_t, uint64_t, uint8_t, expr, __VA_ARGS__)                                            \
    POINTWISE(name##_i32, k, int32_t, uint32_t, uint8_t, expr, __VA_ARGS__)
#define BOOL_KERNEL(op, name, k, expr, ...) POINTWISE(name##_bool, k, uint8_t, uint8_t, uint8_t, expr, __VA_ARGS__)

#define FORMULA(op, name, k, cpu, formula, where) FLOAT_KERNEL(op, name, k, formula, where)
#include "ops/pointwise/operators.h"
INT_OPERATORS(INT_KERNEL)
#define BY_ZERO (j < n ? (report(a.fault, FAULT_DIVISOR, (int)a.node, 0, 0), (real)0) : (real)0)
INT_DIVISIONS(INT_KERNEL)
COMPARISONS(COMPARISON_KERNEL)
FLOAT_TESTS(FLOAT_TEST_KERNEL)
BOOL_OPERATORS(BOOL_KERNEL)

#define CAST_KERNELS(from, F, as_i64, as_i32)                                                                          \
    POINTWISE(from##_to_f32, 1, F, F, float, x, )                                                                      \
    POINTWISE(from##_to_f64, 1, F, F, double, x, )                                                                     \
    POINTWISE(from##_to_i64, 1, F, F, int64_t, as_i64, )                                                               \
    POINTWISE(from##_to_i32, 1, F, F, int32_t, as_i32, )                                                               \
    POINTWISE(from##_to_bool, 1, F, F, uint8_t, x != 0, )
CASTS(CAST_KERNELS)

/* Between types of floats but float64, from and to aligned addresses. */
KERNEL(cast_whole, pointwise_args) {
    enum { EACH = PIECES_OF(F32) };
    const int64_t step = (int64_t)gridDim.x * blockDim.x * AT_ONCE, whole = a.space.count / AT_ONCE * AT_ONCE;

    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * AT_ONCE; i < whole; i += EACH * step) {
        float x[EACH][AT_ONCE];
        read_even_float(a.in[0].data, a.in[0].type, i, step, 0, whole, x);
        UNROLL for (int k = 0; k < EACH; k++) if (i + k * step < whole) write_float(a.out, a.type, i + k * step, x[k]);
    }
    FOR_EACH(i, a.space.count - whole)
    set_float(a.out, a.type, whole + i, get_float(a.in[0].data, a.in[0].type, whole + i));
}

#define WHERE(name, T)                                                                                                 \
    KERNEL(name, pointwise_args) {                                                                                     \
        FOR_EACH(group, (a.space.count + AT_ONCE - 1) / AT_ONCE) {                                                     \
            const int64_t i = group * AT_ONCE;                                                                         \
            const int n = a.space.count - i < AT_ONCE ? (int)(a.space.count - i) : AT_ONCE;                            \
            uint8_t condition[AT_ONCE];                                                                                \
            T x[AT_ONCE], y[AT_ONCE];                                                                                  \
            LOAD_IN(uint8_t, 0, condition)                                                                             \
            LOAD_IN(T, 1, x)                                                                                           \
            LOAD_IN(T, 2, y)                                                                                           \
            for (int j = 0; j < AT_ONCE; j++) x[j] = condition[j] ? x[j] : y[j];                                       \
            store_##T(a.out, a.type, i, n, x);                                                                         \
        }                                                                                                              \
    }
#define WHERE_KERNEL(name, T) WHERE(where_##name, T)
CLASSES(WHERE_KERNEL)
#endif
