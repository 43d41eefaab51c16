/* fused.cu -- mirrors ops/chains/fused.c: chains of pointwise operators as one kernel.
 *
 * Where NVRTC is there a kernel is compiled for every chain (compile.h). Otherwise an interpreter runs them: a thread
 * takes one element, which has a place for each operand and step in the thread's own memory. */
#include "cuda/kernels/kernel.h"

#include "cuda/kernels/chain.h"

#ifdef ORT_HOST
#include "cuda/host/compile.h"
#include "cuda/host/generate.h"
#include "ops/chains/fused.h"
#include "ops/pointwise/dropout.h"

#include <string.h>

_Static_assert((int)CHAIN_OPERANDS == (int)FUSED_OPERANDS && (int)CHAIN_STEPS == (int)FUSED_STEPS &&
                   (int)CHAIN_RESULTS == (int)FUSED_RESULTS && (int)STEP_OPERANDS == (int)TILE_OPERANDS,
               "chain.h repeats ops/op.h and ops/pointwise/pointwise.h");

static status describe_step(ctx *c, const fused_step *s, int place, dtype last_operand, chain_step *out) {
    const tile_class from = tile_class_of(last_operand), to = tile_class_of(s->type);
    const int kind = chain_step_kind(s->op, from, to);

    if (kind < 0) return fail(c, E_UNSUPPORTED, "%s of %s has no CUDA kernel", s->op->name, dtype_name(last_operand));
    *out = (chain_step){.kind = (uint16_t)kind, .type = (uint8_t)s->type, .out = (uint8_t)place};
    return OK;
}

static void set_dropout(const fused_step *s, double to[STEP_PARAMETERS]) {
    const uint32_t words[] = {(uint32_t)s->param[1], dropout_threshold(s->param[0])};
    to[0] = dropout_factor(s->param[0]);
    memcpy(&to[1], words, sizeof words);
}

/* Steps that are not wanted are left out; the others' places are operands and steps in order. */
static status describe(ctx *c, const call *k, const fused_program *p, chain_args *a) {
    chain_program *to = &a->program;
    int place[MOST_PLACES];

    to->n_in = p->n_in;
    for (int i = 0; i < p->n_in; i++) place[i] = i;
    for (int i = 0; i < p->n_steps; i++) {
        const fused_step *s = &p->steps[i];
        const int last = s->in[s->n_in - 1];
        if (!s->wanted) continue;
        chain_step *made = &to->steps[to->n_steps];
        place[p->n_in + i] = p->n_in + to->n_steps;
        TRY(describe_step(c, s, place[p->n_in + i], last < p->n_in ? k->in[last].type : p->steps[last - p->n_in].type,
                          made));
        for (int j = 0; j < s->n_in; j++) made->in[j] = (uint8_t)place[s->in[j]];
        for (int j = 0; j < STEP_PARAMETERS; j++) a->param[to->n_steps][j] = s->param[j];
        if (s->draws) set_dropout(s, a->param[to->n_steps]);
        to->draws |= s->draws;
        to->n_steps++;
    }
    for (int i = 0; i < p->n_in; i++) {
        to->type[i] = (uint8_t)a->in[i].type;
        to->how[i] = (uint8_t)(p->read[i] ? a->in[i].how : UNREAD);
    }
    for (int i = 0; i < p->n_steps; i++) {
        const fused_step *s = &p->steps[i];
        if (s->result < 0) continue;
        to->result[to->n_out] = (uint8_t)place[p->n_in + i];
        to->result_type[to->n_out] = (uint8_t)s->type;
        a->out[to->n_out++] = k->out[s->result].data;
    }
    to->wide = a->space.count > INT32_MAX;
    return OK;
}

status fused_cuda(ctx *c, const call *k) {
    static kernel interpreter = {.name = "fused"};
    const tensor *any = NULL;
    chain_args a;
    fused_program p;
    kernel *compiled = NULL;
    int at_once;

    memset(&a, 0, sizeof a);
    TRY(fused_read(c, k, &p));
    for (int i = 0; i < k->n_out; i++)
        if (tensor_present(&k->out[i])) any = &k->out[i];
    if (!any) return OK;
    space_of(k->in, k->n_in, any, &a.space, a.in);
    TRY(describe(c, k, &p, &a));
    a.seed = k->seed;
    a.seed_at = k->cuda->seed;
    at_once = chain_at_once(&a.program);
    for (int i = 0; i < a.program.n_in; i++)
        if (a.program.how[i] != UNREAD) a.program.how[i] = (uint8_t)chain_reach(&a.space, &a.in[i], at_once);
    TRY(chain_compiled(c, k, &a.program, &compiled));
    if (!compiled) return cuda_launch(c, k, &interpreter, geometry_over(a.space.count, 256, 256), &a);
    return cuda_launch(c, k, compiled, geometry_over(a.space.count, at_once * 256, 256), &a);
}
#endif

#ifdef ORT_DEVICE
#ifndef __CUDACC__
#include <tgmath.h>
#endif

typedef union cell {
    float of_float;
    double of_double;
    int64_t of_int64_t;
    int32_t of_int32_t;
    uint8_t of_uint8_t;
} cell;

DEVICE cell load_cell(const space *in, const source *s, int64_t i) {
    const int64_t at = s->how == DENSE ? i : s->how == SINGLE ? 0 : offset_of(in, s, i);
    cell v;
    v.of_int64_t = 0;
    if (s->type == F32 || s->type == BF16 || s->type == F16) v.of_float = get_float(s->data, s->type, at);
    else if (s->type == F64) v.of_double = get_double(s->data, s->type, at);
    else if (s->type == I64) v.of_int64_t = get_int64_t(s->data, s->type, at);
    else if (s->type == BOOL) v.of_uint8_t = get_uint8_t(s->data, s->type, at);
    else v.of_int32_t = get_int32_t(s->data, s->type, at);
    return v;
}

DEVICE void store_cell(void *to, int type, int64_t i, cell v) {
    if (type == F32) ((float *)to)[i] = v.of_float;
    else if (type == BF16) ((bf16 *)to)[i] = f32_to_bf16(v.of_float);
    else if (type == F16) ((f16 *)to)[i] = f32_to_f16(v.of_float);
    else if (type == F64) ((double *)to)[i] = v.of_double;
    else if (type == I64) ((int64_t *)to)[i] = v.of_int64_t;
    else if (type == I32) ((int32_t *)to)[i] = v.of_int32_t;
    else if (type == I16) ((int16_t *)to)[i] = (int16_t)v.of_int32_t;
    else if (type == BOOL) ((uint8_t *)to)[i] = v.of_uint8_t;
    else ((uint8_t *)to)[i] = (uint8_t)v.of_int32_t;
}

/* What storing leaves of it. */
DEVICE void round_cell(int type, cell *v) {
    if (type == BF16) v->of_float = bf16_to_f32(f32_to_bf16(v->of_float));
    else if (type == F16) v->of_float = f16_to_f32(f32_to_f16(v->of_float));
    else if (type == I16) v->of_int32_t = (int16_t)v->of_int32_t;
    else if (type == I8) v->of_int32_t = (int8_t)v->of_int32_t;
    else if (type == U8) v->of_int32_t = (uint8_t)v->of_int32_t;
}

#define CELLS_1(T) const T x = v[taken->in[0]].of_##T;
#define CELLS_2(T) CELLS_1(T) const T y = v[taken->in[1]].of_##T;
#define CELLS_3(T) CELLS_2(T) const T z = v[taken->in[2]].of_##T;
#define CELLS_4(T) CELLS_3(T) const T w = v[taken->in[3]].of_##T;
#define STEP(id, k, T, U, R, expr, ...)                                                                                \
    case STEP_##id: {                                                                                                  \
        typedef T real;                                                                                                \
        typedef U word;                                                                                                \
        const real p0 = (real)param[0], p1 = (real)param[1];                                                           \
        (void)p0, (void)p1, (void)sizeof(word);                                                                        \
        CELLS_##k(T) __VA_ARGS__;                                                                                      \
        v[taken->out].of_##R = (R)(expr);                                                                              \
        return;                                                                                                        \
    }

/* One family of steps each: the switch of all of them would keep the registers of all. */
#define FLOAT_CASE(op, name, k, expr, ...) STEP(name##_f32, k, float, float, float, expr, __VA_ARGS__)
#define DOUBLE_CASE(op, name, k, expr, ...) STEP(name##_f64, k, double, double, double, expr, __VA_ARGS__)
#define FLOAT_TEST_CASE(op, name, k, expr, ...)                                                                        \
    STEP(name##_f32, k, float, float, uint8_t, expr, __VA_ARGS__)                                                      \
    STEP(name##_f64, k, double, double, uint8_t, expr, __VA_ARGS__)
#define INT_CASE(op, name, k, expr, ...)                                                                               \
    STEP(name##_i64, k, int64_t, uint64_t, int64_t, expr, __VA_ARGS__)                                                 \
    STEP(name##_i32, k, int32_t, uint32_t, int32_t, expr, __VA_ARGS__)
#define COMPARISON_CASE(op, name, k, expr, ...)                                                                        \
    FLOAT_TEST_CASE(op, name, k, expr, __VA_ARGS__)                                                                    \
    STEP(name##_i64, k, int64_t, uint64_t, uint8_t, expr, __VA_ARGS__)                                                 \
    STEP(name##_i32, k, int32_t, uint32_t, uint8_t, expr, __VA_ARGS__)
#define BOOL_CASE(op, name, k, expr, ...) STEP(name##_bool, k, uint8_t, uint8_t, uint8_t, expr, __VA_ARGS__)
#define CAST_CASES(from, F, as_i64, as_i32)                                                                            \
    STEP(from##_to_f32, 1, F, F, float, x, )                                                                           \
    STEP(from##_to_f64, 1, F, F, double, x, )                                                                          \
    STEP(from##_to_i64, 1, F, F, int64_t, as_i64, )                                                                    \
    STEP(from##_to_i32, 1, F, F, int32_t, as_i32, )                                                                    \
    STEP(from##_to_bool, 1, F, F, uint8_t, x != 0, )
#define WHERE_CASE(name, T)                                                                                            \
    case STEP_where_##name:                                                                                            \
        v[taken->out].of_##T = v[taken->in[0]].of_uint8_t ? v[taken->in[1]].of_##T : v[taken->in[2]].of_##T;           \
        return;

FAR void float_step(const chain_step *taken, const double *param, cell *v) {
    switch (taken->kind) {
#define FORMULA(op, name, k, cpu, formula, where) FLOAT_CASE(op, name, k, formula, where)
#include "ops/pointwise/operators.h"
    }
}
FAR void double_step(const chain_step *taken, const double *param, cell *v) {
    switch (taken->kind) {
#define FORMULA(op, name, k, cpu, formula, where) DOUBLE_CASE(op, name, k, formula, where)
#include "ops/pointwise/operators.h"
    }
}
FAR void other_step(const chain_step *taken, const double *param, cell *v) {
    switch (taken->kind) {
        INT_OPERATORS(INT_CASE)
        FLOAT_TESTS(FLOAT_TEST_CASE)
        COMPARISONS(COMPARISON_CASE)
        BOOL_OPERATORS(BOOL_CASE)
        CASTS(CAST_CASES)
        CLASSES(WHERE_CASE)
    }
}

DEVICE int is_float_step(int kind) { return kind < STEP_is_nan_f32; }

KERNEL(fused, chain_args) {
    const chain_program *p = &a.program;
    const uint64_t seed = p->draws ? CHAIN_SEED : 0;

    FOR_EACH(i, a.space.count) {
        cell v[MOST_PLACES];
        for (int j = 0; j < p->n_in; j++)
            if (p->how[j] != UNREAD) v[j] = load_cell(&a.space, &a.in[j], i);
        for (int j = 0; j < p->n_steps; j++) {
            const chain_step *s = &p->steps[j];
            if (s->kind == STEP_drop_f32 || s->kind == STEP_drop_f64) {
                const int kept = word_of(seed, word_in(a.param[j][1], 0), i) >= word_in(a.param[j][1], 1);
                if (s->kind == STEP_drop_f32)
                    v[s->out].of_float = v[s->in[0]].of_float * (kept ? (float)a.param[j][0] : 0);
                else v[s->out].of_double = v[s->in[0]].of_double * (kept ? a.param[j][0] : 0);
            } else if (!is_float_step(s->kind)) {
                other_step(s, a.param[j], v);
            } else if (s->type == F64) {
                double_step(s, a.param[j], v);
            } else {
                float_step(s, a.param[j], v);
            }
            round_cell(s->type, &v[s->out]);
        }
        for (int j = 0; j < p->n_out; j++) store_cell(a.out[j], p->result_type[j], i, v[p->result[j]]);
    }
}
#endif
