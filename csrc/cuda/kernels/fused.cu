/* fused.cu -- mirrors ops/chains/fused.c and fused_reduce.c: chains of pointwise operators as one kernel, with sums of what
 * they make, and a kernel that adds up the sums of parts.
 *
 * Where NVRTC is there a kernel is compiled for every chain (compile.h). Otherwise an interpreter runs them: a thread
 * takes one element, or those of a part that are added up, with a place for each operand and step in its own memory. How
 * many parts there are depends on the shape alone, and so does the order of each kernel's sums. */
#include "cuda/kernels/kernel.h"

#include "cuda/kernels/chain.h"

#ifdef ORT_HOST
#include "cuda/host/compile.h"
#include "cuda/host/generate.h"
#include "ops/chains/fused.h"
#include "ops/pointwise/dropout.h"

#include <string.h>

kernel_fn reduce_sum_cuda, reduce_mean_cuda; /* reduce.cu */

_Static_assert((int)CHAIN_OPERANDS == (int)FUSED_OPERANDS && (int)CHAIN_STEPS == (int)FUSED_STEPS &&
                   (int)CHAIN_RESULTS == (int)FUSED_RESULTS && (int)STEP_OPERANDS == (int)TILE_OPERANDS &&
                   (int)CHAIN_FOLDS == (int)FUSED_FOLDS,
               "chain.h repeats ops/op.h and ops/pointwise/pointwise.h");

/* --- the program -------------------------------------------------------------------------------------------------- */

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

/* The totals that are wanted. `place`: of operands and steps. */
static status describe_folds(ctx *c, const call *k, const int *place, chain_args *a) {
    const attr *folded = node_attr(k->node, "folded");
    const char *names = node_string(k->node, "folds");
    const int n_results = node_attr(k->node, "results")->count;
    chain_program *to = &a->program;

    for (int i = 0; folded && i < folded->count; i++) {
        const tensor *total = &k->out[n_results + i];
        const op_def *op = fused_operator(&names);
        if (!op || (op->cuda != reduce_sum_cuda && op->cuda != reduce_mean_cuda))
            return fail(c, E_UNSUPPORTED, "%s of a chain has no CUDA kernel", op ? op->name : "a total");
        if (!tensor_present(total)) continue;
        to->folded[to->n_folds] = (uint8_t)place[k->n_in + folded->ints[i]];
        to->fold_type[to->n_folds] = (uint8_t)total->type;
        a->folds.divisor[to->n_folds] = op->cuda == reduce_mean_cuda ? (double)a->folds.length : 1;
        a->folds.out[to->n_folds++] = total->data;
    }
    to->columns = to->n_folds && a->folds.inner != 1;
    return OK;
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
    return describe_folds(c, k, place, a);
}

/* --- folds -------------------------------------------------------------------------------------------------------- */

/* Blocks that a GPU is busy with; elements that a thread adds up in a part, at least so many pieces. */
enum { BUSY = 512, WORTH_A_PART = 2 };
enum { FEWEST_ACROSS = 4 }; /* threads of neighbouring columns */

static int64_t at_least_one(int64_t x) { return x < 1 ? 1 : x; }

/* Shares elements out, at_once of them a thread, and says how many threads a block has. */
static int share_out(chain_folds *f, int at_once) {
    const int64_t pieces = ((f->inner == 1 ? f->length : f->inner) + at_once - 1) / at_once;
    int lanes = 1;

    f->across = f->inner == 1 ? 1 : FEWEST_ACROSS;
    while (f->across < (f->inner == 1 ? FOLD_THREADS : WARP) && f->across < pieces) f->across *= 2;
    if (f->inner == 1) {
        const int64_t blocks = (f->outer * f->across + FOLD_THREADS - 1) / FOLD_THREADS;
        const int64_t most = f->across < FOLD_THREADS ? 1 : pieces / (FOLD_THREADS * WORTH_A_PART);
        f->parts = at_least_one(BUSY / at_least_one(blocks) < most ? BUSY / at_least_one(blocks) : most);
        return FOLD_THREADS;
    }
    /* Many columns keep a GPU busy by themselves: a thread has whole ones. */
    if (f->outer * pieces >= BUSY * FOLD_THREADS) f->across = FOLD_THREADS;
    while (lanes < FOLD_THREADS / f->across && (lanes < f->length || lanes * f->across < WARP)) lanes *= 2;
    const int64_t blocks = f->outer * ((pieces + f->across - 1) / f->across);
    const int64_t most = f->length / (lanes * WORTH_A_PART * 2);
    f->parts = at_least_one(BUSY / at_least_one(blocks) < most ? BUSY / at_least_one(blocks) : most);
    return lanes * f->across;
}

static int64_t results_of(const chain_folds *f) { return f->outer * f->inner; }

static bool folds_of(const node *n, chain_folds *f) {
    fold_space s;

    if (!fused_fold_space(fused_reduce_shape(n), fused_reduce_axes(n), &s)) return false;
    f->outer = s.outer, f->length = s.length, f->inner = s.inner;
    return true;
}

size_t fused_reduce_cuda_workspace(const node *n) {
    chain_folds f;
    size_t most = 0;

    if (!folds_of(n, &f)) return 0;
    for (int at_once = 4; at_once <= 8; at_once *= 2) {
        (void)share_out(&f, at_once);
        const size_t bytes = (size_t)(f.parts * results_of(&f)) * sizeof(double);
        if (f.parts > 1 && bytes > most) most = bytes;
    }
    return most * (size_t)node_attr(n, "folded")->count;
}

/* Whether a compiled kernel's threads have whole pieces, and a warp of a dropout what it draws for. */
static bool is_even(const chain_args *a, int at_once) {
    const int64_t line = a->program.columns ? a->folds.inner : a->folds.length;
    return line % (a->program.draws ? 64 : at_once) == 0;
}

static status launch_folds(ctx *c, const call *k, int at_once, chain_args *a) {
    static kernel interpreter = {.name = "fused_fold"}, join = {.name = "fused_join"};
    chain_folds *f = &a->folds;
    const int threads = share_out(f, at_once);
    const int64_t tasks = results_of(f) * f->parts;
    kernel *compiled = NULL;
    geometry g = geometry_over(tasks, FOLD_THREADS, FOLD_THREADS);

    f->partial = k->work;
    f->joined = 1;
    while (f->joined < WARP && f->joined < results_of(f)) f->joined *= 2;
    if (is_even(a, at_once)) TRY(chain_compiled(c, k, &a->program, &compiled));
    if (compiled && a->program.columns)
        g = geometry_over(tasks / f->inner * ((f->inner / at_once + f->across - 1) / f->across), 1, threads);
    else if (compiled) g = geometry_over(tasks, threads / f->across, threads);
    TRY(cuda_launch(c, k, compiled ? compiled : &interpreter, g, a));
    if (f->parts == 1) return OK;
    return cuda_launch(c, k, &join, geometry_over(results_of(f) * a->program.n_folds, f->joined, FOLD_THREADS), a);
}

/* --- the operators ------------------------------------------------------------------------------------------------ */

/* A tensor that tells the shape of the chain's elements; false where nothing is wanted. */
static bool shape_of(const call *k, tensor *any) {
    bool is_wanted = false;

    for (int i = 0; i < k->n_out; i++) {
        if (!tensor_present(&k->out[i])) continue;
        *any = k->out[i];
        is_wanted = true;
    }
    if (node_attr(k->node, "folded")) any->shape = *fused_reduce_shape(k->node);
    return is_wanted;
}

status fused_cuda(ctx *c, const call *k) {
    static kernel interpreter = {.name = "fused"};
    chain_args a;
    fused_program p;
    kernel *compiled = NULL;
    tensor any;
    int at_once;

    memset(&a, 0, sizeof a);
    TRY(fused_read(c, k, &p));
    if (!shape_of(k, &any)) return OK;
    if (node_attr(k->node, "folded") && !folds_of(k->node, &a.folds))
        return fail(c, E_UNSUPPORTED, "a chain that is folded along axes apart has no CUDA kernel");
    space_of(k->in, k->n_in, &any, &a.space, a.in);
    TRY(describe(c, k, &p, &a));
    a.seed = k->seed;
    a.seed_at = k->cuda->seed;
    at_once = chain_at_once(&a.program);
    for (int i = 0; i < a.program.n_in; i++)
        if (a.program.how[i] != UNREAD) a.program.how[i] = (uint8_t)chain_reach(&a.space, &a.in[i], at_once);
    if (a.program.n_folds) return launch_folds(c, k, at_once, &a);
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

/* Element i of every operand and step; results are stored. */
FAR void run_element(const chain_args *a, uint64_t seed, int64_t i, cell v[MOST_PLACES]) {
    const chain_program *p = &a->program;

    for (int j = 0; j < p->n_in; j++)
        if (p->how[j] != UNREAD) v[j] = load_cell(&a->space, &a->in[j], i);
    for (int j = 0; j < p->n_steps; j++) {
        const chain_step *s = &p->steps[j];
        const double *param = a->param[j];
        if (s->kind == STEP_drop_f32 || s->kind == STEP_drop_f64) {
            const int kept = word_of(seed, word_in(param[1], 0), i) >= word_in(param[1], 1);
            if (s->kind == STEP_drop_f32) v[s->out].of_float = v[s->in[0]].of_float * (kept ? (float)param[0] : 0);
            else v[s->out].of_double = v[s->in[0]].of_double * (kept ? param[0] : 0);
        } else if (!is_float_step(s->kind)) {
            other_step(s, param, v);
        } else if (s->type == F64) {
            double_step(s, param, v);
        } else {
            float_step(s, param, v);
        }
        round_cell(s->type, &v[s->out]);
    }
    for (int j = 0; j < p->n_out; j++) store_cell(a->out[j], p->result_type[j], i, v[p->result[j]]);
}

KERNEL(fused, chain_args) {
    const uint64_t seed = a.program.draws ? CHAIN_SEED : 0;

    FOR_EACH(i, a.space.count) {
        cell v[MOST_PLACES];
        run_element(&a, seed, i, v);
    }
}

/* A result's part a thread, whose elements are taken in order. */
KERNEL(fused_fold, chain_args) {
    const chain_folds *f = &a.folds;
    const chain_program *p = &a.program;
    const uint64_t seed = p->draws ? CHAIN_SEED : 0;

    FOR_EACH(task, f->outer * f->inner * f->parts) {
        const int64_t result = quotient(task, f->parts), part = task - result * f->parts;
        const int64_t outer = quotient(result, f->inner), column = result - outer * f->inner;
        double total[CHAIN_FOLDS] = {0};

        for (int64_t i = part_begin(f, part); i < part_begin(f, part + 1); i++) {
            cell v[MOST_PLACES];
            run_element(&a, seed, (outer * f->length + i) * f->inner + column, v);
            for (int j = 0; j < p->n_folds; j++)
                total[j] += p->fold_type[j] == F64 ? v[p->folded[j]].of_double : v[p->folded[j]].of_float;
        }
        for (int j = 0; j < p->n_folds; j++) give_total(f, j, p->fold_type[j], result, part, total[j]);
    }
}

/* Adds up the parts of neighbouring results, each by the lanes of a block. */
KERNEL(fused_join, chain_args) {
    SHARED(double, sums, FOLD_THREADS);
    const chain_folds *f = &a.folds;
    const int across = f->joined, lanes = blockDim.x / across, thread = threadIdx.x;
    const int64_t results = f->outer * f->inner, groups = quotient(results + across - 1, across);

    FOR_BLOCKS(task, groups * a.program.n_folds) {
        const int fold = (int)quotient(task, groups);
        const int64_t result = (task - fold * groups) * across + thread % across;
        double total = 0;

        if (result < results)
            for (int64_t part = thread / across; part < f->parts; part += lanes)
                total += f->partial[(fold * f->parts + part) * results + result];
        sums[thread] = total;
        for (int most = blockDim.x / 2; most >= across; most /= 2) {
            __syncthreads();
            if (thread < most) sums[thread] += sums[thread + most];
        }
        if (thread < across && result < results) store_total(f, fold, a.program.fold_type[fold], result, sums[thread]);
        __syncthreads(); /* the next task's sums take their place */
    }
}
#endif
