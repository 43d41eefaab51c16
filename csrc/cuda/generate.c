/* generate.c -- the table of steps, and a chain as the text of a kernel: what fused.cu interprets, step by step, with
 * the types, and the way that each operand is read, written out. */
#include "cuda/generate.h"
#include "cuda/driver.h"

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
    FLOAT_OPERATORS(FLOAT_ROW)
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
