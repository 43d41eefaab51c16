/* generate.c -- writes a chain as the text of a kernel, by a table: what fused.cu interprets, step by step, with
 * the types, and the way that each operand is read, written out. */
#include "cuda/host/generate.h"
#include "cuda/host/driver.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* --- steps -------------------------------------------------------------------------------------------------------- */

typedef struct row {
    const char *name;
    tile_class from, to;
    int operands;
    const char *expression, *before;
} row;

/* clang-format off */

#define FLOAT_ROW(op, name, k, expr, ...)                                                                              \
    [STEP_##name##_f32] = {op, TILE_F32, TILE_F32, k, #expr, #__VA_ARGS__},                                            \
    [STEP_##name##_f64] = {op, TILE_F64, TILE_F64, k, #expr, #__VA_ARGS__},
#define FLOAT_TEST_ROW(op, name, k, expr, ...)                                                                         \
    [STEP_##name##_f32] = {op, TILE_F32, TILE_BOOL, k, #expr, #__VA_ARGS__},                                           \
    [STEP_##name##_f64] = {op, TILE_F64, TILE_BOOL, k, #expr, #__VA_ARGS__},
#define COMPARISON_ROW(op, name, k, expr, ...)                                                                         \
    FLOAT_TEST_ROW(op, name, k, expr, __VA_ARGS__)                                                                     \
    [STEP_##name##_i64] = {op, TILE_I64, TILE_BOOL, k, #expr, #__VA_ARGS__},                                           \
    [STEP_##name##_i32] = {op, TILE_I32, TILE_BOOL, k, #expr, #__VA_ARGS__},
#define INT_ROW(op, name, k, expr, ...)                                                                                \
    [STEP_##name##_i64] = {op, TILE_I64, TILE_I64, k, #expr, #__VA_ARGS__},                                            \
    [STEP_##name##_i32] = {op, TILE_I32, TILE_I32, k, #expr, #__VA_ARGS__},
#define BOOL_ROW(op, name, k, expr, ...) [STEP_##name##_bool] = {op, TILE_BOOL, TILE_BOOL, k, #expr, #__VA_ARGS__},
#define CLASS_f32 TILE_F32
#define CLASS_f64 TILE_F64
#define CLASS_i64 TILE_I64
#define CLASS_i32 TILE_I32
#define CLASS_bool TILE_BOOL
#define CAST_ROWS(from, T, as_i64, as_i32)                                                                             \
    [STEP_##from##_to_f32] = {"Cast", CLASS_##from, TILE_F32, 1, "x", ""},                                             \
    [STEP_##from##_to_f64] = {"Cast", CLASS_##from, TILE_F64, 1, "x", ""},                                             \
    [STEP_##from##_to_i64] = {"Cast", CLASS_##from, TILE_I64, 1, #as_i64, ""},                                         \
    [STEP_##from##_to_i32] = {"Cast", CLASS_##from, TILE_I32, 1, #as_i32, ""},                                         \
    [STEP_##from##_to_bool] = {"Cast", CLASS_##from, TILE_BOOL, 1, "x != 0", ""},
#define WHERE_ROW(name, T) [STEP_where_##name] = {"Where", CLASS_##name, CLASS_##name, 3, "", ""},

static const row rows[STEP_KINDS] = {
#define FORMULA(op, name, k, cpu, formula, where) FLOAT_ROW(#op, name, k, formula, where)
#include "ops/pointwise/operators.h"
    FLOAT_TESTS(FLOAT_TEST_ROW)
    COMPARISONS(COMPARISON_ROW)
    INT_OPERATORS(INT_ROW)
    BOOL_OPERATORS(BOOL_ROW)
    CASTS(CAST_ROWS)
    CLASSES(WHERE_ROW)
    [STEP_drop_f32] = {"DropoutTrain", TILE_F32, TILE_F32, 1, "", ""},
    [STEP_drop_f64] = {"DropoutTrain", TILE_F64, TILE_F64, 1, "", ""},
};
/* clang-format on */

int chain_step_kind(const op_def *op, tile_class from, tile_class to) {
    static const op_def *_Atomic known[STEP_KINDS];

    for (int i = 0; i < STEP_KINDS; i++) {
        if (rows[i].from != from || rows[i].to != to) continue;
        const op_def *is = atomic_load_explicit(&known[i], memory_order_relaxed);
        if (is ? is != op : strcmp(rows[i].name, op->name) != 0) continue;
        atomic_store_explicit(&known[i], op, memory_order_relaxed);
        return i;
    }
    return -1;
}

bool chain_step_formula(int kind, step_formula *out) {
    if (kind < 0 || kind >= STEP_KINDS) return false;
    const row *r = &rows[kind];
    *out = (step_formula){r->name, r->expression, r->before, r->from, r->to, r->operands};
    return true;
}

/* --- text --------------------------------------------------------------------------------------------------------- */

typedef struct writer {
    char *to;
    size_t room, length;
} writer;

static void put(writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(writer *w, const char *format, ...) {
    const bool fits = w->length < w->room;
    va_list list;

    va_start(list, format);
    const int n = vsnprintf(fits ? w->to + w->length : NULL, fits ? w->room - w->length : 0, format, list);
    va_end(list);
    if (n > 0) w->length += (size_t)n;
}

static const char *const type_of[TILE_CLASSES] = {[TILE_F32] = "float",
                                                  [TILE_F64] = "double",
                                                  [TILE_I64] = "int64_t",
                                                  [TILE_I32] = "int32_t",
                                                  [TILE_BOOL] = "uint8_t"};
static const char *const word_of[TILE_CLASSES] = {[TILE_F32] = "float",
                                                  [TILE_F64] = "double",
                                                  [TILE_I64] = "uint64_t",
                                                  [TILE_I32] = "uint32_t",
                                                  [TILE_BOOL] = "uint8_t"};

int chain_at_once(const chain_program *p) {
    bool is_narrow = false;
    for (int i = 0; i < p->n_in; i++)
        is_narrow = is_narrow || (p->how[i] != UNREAD && p->how[i] != SINGLE && dtype_size((dtype)p->type[i]) < 4);
    for (int i = 0; i < p->n_out; i++) is_narrow = is_narrow || dtype_size((dtype)p->result_type[i]) < 4;
    return is_narrow ? 8 : 4;
}

/* The last dimension is a multiple of what a thread takes, so these elements are of one row. */
reach chain_reach(const space *a, const source *s, int at_once) {
    const int last = a->rank - 1;
    bool is_even = true;

    if (s->how != STRIDES || a->dim[last] % at_once != 0) return (reach)s->how;
    if (s->stride[last] == 0) return SPREAD;
    for (int d = 0; d < last; d++) is_even = is_even && s->stride[d] % at_once == 0;
    return s->stride[last] == 1 && is_even ? RUNS : STRIDES;
}

static const char *class_of(int type) { return type_of[tile_class_of((dtype)type)]; }

static void put_offset(writer *w, const chain_program *p, int i, const char *at) {
    put(w, "%s_offset_of(&a.space, &a.in[%d], %s)", p->wide ? "wide" : "narrow", i, at);
}

/* All COUNT elements of a thread, of which every piece is aligned. */
static void put_read(writer *w, const chain_program *p, int i) {
    const char *type = class_of(p->type[i]);

    put(w, "            %s v%d[COUNT];\n            ", type, i);
    if (p->how[i] == SINGLE) {
        put(w, "EACH v%d[j] = single%d;\n", i, i);
    } else if (p->how[i] == DENSE || p->how[i] == RUNS) {
        put(w, "read_%s(a.in[%d].data, %d, ", type, i, p->type[i]);
        if (p->how[i] == DENSE) put(w, "first");
        else put_offset(w, p, i, "first");
        put(w, ", v%d);\n", i);
    } else if (p->how[i] == SPREAD) {
        put(w, "const %s spread%d = get_%s(a.in[%d].data, %d, ", type, i, type, i, p->type[i]);
        put_offset(w, p, i, "first");
        put(w, ");\n            EACH v%d[j] = spread%d;\n", i, i);
    } else {
        put(w, "EACH v%d[j] = get_%s(a.in[%d].data, %d, ", i, type, i, p->type[i]);
        put_offset(w, p, i, "first + j");
        put(w, ");\n");
    }
}

/* The one element at `at`. */
static void put_get(writer *w, const chain_program *p, int i) {
    const char *type = class_of(p->type[i]);

    if (p->how[i] == SINGLE) {
        put(w, "            %s v%d[COUNT] = {single%d};\n", type, i, i);
        return;
    }
    put(w, "            %s v%d[COUNT] = {get_%s(a.in[%d].data, %d, ", type, i, type, i, p->type[i]);
    if (p->how[i] == DENSE) put(w, "at");
    else put_offset(w, p, i, "at");
    put(w, ")};\n");
}

/* What storing leaves of it. */
static const char *rounding(int type) {
    static const char *const by[DTYPE_COUNT] = {[BF16] = "bf16_to_f32(f32_to_bf16(%s))",
                                                [F16] = "f16_to_f32(f32_to_f16(%s))",
                                                [I16] = "(int16_t)(%s)",
                                                [I8] = "(int8_t)(%s)",
                                                [U8] = "(uint8_t)(%s)"};
    return by[type];
}

/* Whether a step or a fold reads what this one makes; what is only written is rounded as it is written. */
static bool is_read(const chain_program *p, const chain_step *s) {
    for (int i = 0; i < p->n_folds; i++)
        if (p->folded[i] == s->out) return true;
    for (int i = 0; i < p->n_steps; i++)
        for (int j = 0; j < rows[p->steps[i].kind].operands; j++)
            if (p->steps[i].in[j] == s->out) return true;
    return false;
}

static void put_rounding(writer *w, const chain_program *p, const chain_step *s, bool whole) {
    char place[16];
    const char *by = rounding(s->type), *rest;

    if (!by || !is_read(p, s)) return;
    if (whole && s->type == BF16) {
        put(w, "            round_to_bf16(v%d);\n", s->out);
        return;
    }
    (void)snprintf(place, sizeof place, "v%d[j]", s->out);
    rest = strstr(by, "%s");
    put(w, "            EACH %s = %.*s%s%s;\n", place, (int)(rest - by), by, place, rest + 2);
}

static bool is_dropout(const chain_step *s) { return s->kind == STEP_drop_f32 || s->kind == STEP_drop_f64; }

static void put_step(writer *w, const chain_program *p, const chain_step *s, int index, bool whole) {
    static const char names[] = "xyzw";
    const row *r = &rows[s->kind];
    const char *from = type_of[r->from], *to = type_of[r->to];

    put(w, "            %s v%d[COUNT];\n", to, s->out);
    if (is_dropout(s)) {
        put(w, "            EACH v%d[j] = v%d[j] * (kept%d >> (place + j) & 1 ? (%s)a.param[%d][0] : 0);\n", s->out,
            s->in[0], index, to, index);
    } else if (!*r->expression) { /* Where */
        put(w, "            EACH v%d[j] = v%d[j] ? v%d[j] : v%d[j];\n", s->out, s->in[0], s->in[1], s->in[2]);
    } else {
        put(w, "            EACH {\n                typedef %s real;\n                typedef %s word;\n", from,
            word_of[r->from]);
        put(w, "                const real p0 = (real)a.param[%d][0], p1 = (real)a.param[%d][1];\n", index, index);
        put(w, "                (void)p0, (void)p1, (void)sizeof(word);\n");
        for (int i = 0; i < r->operands; i++) put(w, "                const real %c = v%d[j];\n", names[i], s->in[i]);
        put(w, "                %s;\n                v%d[j] = (%s)(%s);\n            }\n", r->before, s->out, to,
            r->expression);
    }
    put_rounding(w, p, s, whole);
}

/* What is the same for all elements, before the loop. */
static void put_singles(writer *w, const chain_program *p) {
    for (int i = 0; i < p->n_in; i++)
        if (p->how[i] == SINGLE)
            put(w, "    const %s single%d = get_%s(a.in[%d].data, %d, 0);\n", class_of(p->type[i]), i,
                class_of(p->type[i]), i, p->type[i]);
}

static void put_aligned(writer *w, const chain_program *p) {
    put(w, "    const int aligned = 1");
    for (int i = 0; i < p->n_in; i++)
        if (p->how[i] == DENSE || p->how[i] == RUNS) put(w, " && IS_ALIGNED(a.in[%d].data, %d)", i, p->type[i]);
    for (int i = 0; i < p->n_out; i++) put(w, " && IS_ALIGNED(a.out[%d], %d)", i, p->result_type[i]);
    put(w, ";\n");
}

/* Adds what is folded to the thread's totals, which have registers: no index finds one. */
static void put_folds(writer *w, const chain_program *p, bool whole) {
    for (int i = 0; i < p->n_folds; i++) {
        const int v = p->folded[i];
        if (!p->columns) put(w, "            EACH total%d += v%d[j];\n", i, v);
        else if (whole) put(w, "            EACH total%d[j] += v%d[j];\n", i, v);
        else
            put(w,
                "            UNROLL for (int j = 0; j < AT_ONCE; j++) total%d[j] = j == place ? total%d[j] + v%d[0] : total%d[j];\n",
                i, i, v, i);
    }
}

/* Whole pieces where all of a thread's elements are there and aligned; else one after the other. */
static void put_body(writer *w, const chain_program *p, bool whole) {
    put(w, "#undef COUNT\n#define COUNT %s\n", whole ? "AT_ONCE" : "1");
    for (int i = 0; i < p->n_in; i++) {
        if (p->how[i] == UNREAD) continue;
        if (whole) put_read(w, p, i);
        else put_get(w, p, i);
    }
    for (int i = 0; i < p->n_steps; i++) put_step(w, p, &p->steps[i], i, whole);
    for (int i = 0; i < p->n_out; i++)
        put(w, "            %s_%s(a.out[%d], %d, %s, v%d%s);\n", whole ? "write" : "set", class_of(p->result_type[i]),
            i, p->result_type[i], whole ? "first" : "at", p->result[i], whole ? "" : "[0]");
    put_folds(w, p, whole);
}

/* A thread's elements from `first` on. `there`: when all of them are; `each`: when one of them, at `place`, is. */
static void put_elements(writer *w, const chain_program *p, const char *there, const char *each) {
    put(w, "        if (%s) {\n            const int place = 0;\n            (void)place;\n", there);
    put_body(w, p, true);
    put(w, "        } else NOT_UNROLLED for (int place = 0; %s; place++) {\n", each);
    put(w, "            const int64_t at = first + place;\n");
    put_body(w, p, false);
    put(w, "        }\n");
}

/* What a dropout keeps of them: the warp draws together, whatever its threads have to do. */
static void put_draws(writer *w, const chain_program *p) {
    for (int i = 0; i < p->n_steps; i++)
        if (is_dropout(&p->steps[i]))
            put(w,
                "        const uint32_t kept%d = kept_bits(seed, word_in(a.param[%d][1], 0), word_in(a.param[%d][1], 1), first);\n",
                i, i, i);
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

static void put_without_folds(writer *w, const chain_program *p) {
    put(w, "    const int64_t groups = (a.space.count + AT_ONCE - 1) / AT_ONCE;\n");
    put(w, "    FOR_EACH(group, %s) {\n", p->draws ? "(groups + WARP - 1) / WARP * WARP" : "groups");
    put(w, "        const int64_t first = group * AT_ONCE, left = a.space.count - first;\n");
    put_draws(w, p);
    put_elements(w, p, "aligned && left >= AT_ONCE", "place < AT_ONCE && place < left");
    put(w, "    }\n");
}

static void put_totals(writer *w, const chain_program *p) {
    for (int i = 0; i < p->n_folds; i++)
        put(w, "        %s total%d%s;\n", class_of(p->fold_type[i]), i, p->columns ? "[AT_ONCE] = {0}" : " = 0");
}

/* Threads `across` a row have the same part of it. */
static void put_rows(writer *w, const chain_program *p) {
    put(w, "    const int own = threadIdx.x %% a.folds.across * AT_ONCE, wide = a.folds.across * AT_ONCE;\n"
           "    const int64_t each = blockDim.x / a.folds.across, tasks = a.folds.outer * a.folds.parts;\n"
           "    FOR_BLOCKS(turn, quotient(tasks + each - 1, each)) {\n"
           "        const int64_t task = turn * each + threadIdx.x / a.folds.across;\n"
           "        const int64_t row = quotient(task, a.folds.parts), part = task - row * a.folds.parts;\n"
           "        const int64_t begin = part_begin(&a.folds, part), end = part_begin(&a.folds, part + 1);\n");
    put_totals(w, p);
    put(w, "        for (int64_t from = begin; from < end; from += wide) {\n"
           "        const int64_t first = row * a.folds.length + from + own;\n");
    put_draws(w, p);
    put(w, "        if (from + own >= end || task >= tasks) continue;\n");
    put_elements(w, p, "aligned", "place < AT_ONCE");
    put(w, "        }\n");
    for (int i = 0; i < p->n_folds; i++) {
        put(w, "        total%d = row_total_%s(total%d, a.folds.across);\n", i, class_of(p->fold_type[i]), i);
        put(w, "        if (own == 0 && task < tasks) give_total(&a.folds, %d, %d, row, part, total%d);\n", i,
            p->fold_type[i], i);
    }
    put(w, "    }\n");
}

/* Lanes of rows, each of threads `across` neighbouring columns. */
static void put_columns(writer *w, const chain_program *p) {
    put(w, "    const int across = a.folds.across, wide = across * AT_ONCE, lanes = blockDim.x / across;\n"
           "    const int own = threadIdx.x %% across * AT_ONCE, lane = threadIdx.x / across;\n"
           "    const int64_t groups = quotient(a.folds.inner + wide - 1, wide);\n"
           "    FOR_BLOCKS(task, a.folds.outer * groups * a.folds.parts) {\n"
           "        const int64_t rest = quotient(task, groups), outer = quotient(rest, a.folds.parts);\n"
           "        const int64_t part = rest - outer * a.folds.parts, column = (task - rest * groups) * wide;\n"
           "        const int64_t begin = part_begin(&a.folds, part), end = part_begin(&a.folds, part + 1);\n");
    put_totals(w, p);
    put(w, "        for (int64_t from = begin; from < end; from += lanes) {\n"
           "        const int64_t row = from + lane;\n"
           "        const int64_t first = (outer * a.folds.length + row) * a.folds.inner + column + own;\n");
    put_draws(w, p);
    put(w, "        if (row >= end || column + own >= a.folds.inner) continue;\n");
    put_elements(w, p, "aligned", "place < AT_ONCE");
    put(w, "        }\n");
    for (int i = 0; i < p->n_folds; i++)
        put(w,
            "        column_totals_%s(&a.folds, %d, %d, outer * a.folds.inner + column, a.folds.inner - column, part, total%d);\n",
            class_of(p->fold_type[i]), i, p->fold_type[i], i);
    put(w, "    }\n");
}

size_t chain_text(const chain_program *p, char *to, size_t room) {
    writer w = {to, room, 0};

    put(&w, "#define IS_CHAIN\n#define AT_ONCE %d\n", chain_at_once(p));
    put(&w, "#include \"cuda/kernels/kernel.h\"\n#include \"cuda/kernels/chain.h\"\n");
    put(&w, "#ifndef __CUDACC__\n#include <tgmath.h>\n#endif\n");
    put(&w, "#define EACH UNROLL for (int j = 0; j < COUNT; j++)\n\nKERNEL(chain, chain_args) {\n");
    put_aligned(&w, p);
    put_singles(&w, p);
    if (p->draws) put(&w, "    const uint64_t seed = CHAIN_SEED;\n");
    if (p->n_folds == 0) put_without_folds(&w, p);
    else if (p->columns) put_columns(&w, p);
    else put_rows(&w, p);
    put(&w, "}\n");
    return w.length;
}
