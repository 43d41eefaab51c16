/* pointwise.h -- declares pointwise operators as functions over tiles.
 *
 * A pointwise operator is one loop over contiguous tiles of a few hundred elements; tile.c reads and writes them, and
 * pointwise.c does everything else (broadcasting, threads). Narrow types are widened while a tile is loaded and narrowed
 * when it is stored, so each operator is written for float and double only (and int64/int32 where integers make
 * sense). The same functions are the steps of fused chains. */
#ifndef ORT_OPS_POINTWISE_H
#define ORT_OPS_POINTWISE_H

#include "core/parallel.h"
#include "ops/op.h"
#include "ops/pointwise/tile.h"

/* All operands are present and of one type; out[0] is of that type and their broadcast shape. */
status infer_pointwise(graph *g, node *n);
/* The kernels behind every POINTWISE record. */
status pointwise_cpu(ctx *c, const call *k);
size_t pointwise_workspace(const node *n);
kernel_fn pointwise_cuda; /* cuda/kernels/pointwise.cu; not for every operator and type */

/* Gradient rules of an operator F of one operand with its own operator for it and the same attributes:
 * dx = FGrad(dy, x), or FGrad(dy, y). */
status pointwise_grad_x(graph *g, const node *n, value *const dy[], value *dx[]);
status pointwise_grad_y(graph *g, const node *n, value *const dy[], value *dx[]);

/* --- for kernels that run several tile functions in a row ------------------------------------------------------------ */

/* The tile function of an operator with operands and output of these types (NULL: there is none); a node's parameters. */
tile_fn *tile_function(const op_def *op, dtype last_operand, dtype output);
void tile_parameters(const node *n, double param[TILE_PARAMS]);

/* --- tile functions --------------------------------------------------------------------------------------------------
 * TILE_FN(name, k, T, R, expr, where): a result of type R from k operands x, y, z, w of type T. In the expression
 * `real` is T and p0, p1 are the first two parameters; `where` may declare what else it uses. An output that equals an
 * operand depends on no other iteration, which the compiler is told. */

#define TILE_OPERANDS_1(T) const T *in_x = in[0];
#define TILE_OPERANDS_2(T) TILE_OPERANDS_1(T) const T *in_y = in[1];
#define TILE_OPERANDS_3(T) TILE_OPERANDS_2(T) const T *in_z = in[2];
#define TILE_OPERANDS_4(T) TILE_OPERANDS_3(T) const T *in_w = in[3];
#define TILE_LOADS_1(T) const T x = in_x[i];
#define TILE_LOADS_2(T) TILE_LOADS_1(T) const T y = in_y[i];
#define TILE_LOADS_3(T) TILE_LOADS_2(T) const T z = in_z[i];
#define TILE_LOADS_4(T) TILE_LOADS_3(T) const T w = in_w[i];

#define TILE_FN(name, k, T, R, expr, ...)                                                                              \
    SIMD static void name(int64_t n, void *out, const void *const *in, const double *param) {                          \
        typedef T real __attribute__((unused));                                                                        \
        const T p0 __attribute__((unused)) = (T)param[0], p1 __attribute__((unused)) = (T)param[1];                    \
        TILE_OPERANDS_##k(T) R *o = out;                                                                               \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {                                                         \
            TILE_LOADS_##k(T) __VA_ARGS__;                                                                             \
            o[i] = (R)(expr);                                                                                          \
        }                                                                                                              \
    }

#define TILE_1(name, T, expr) TILE_FN(name, 1, T, T, expr, )
#define TILE_2(name, T, R, expr) TILE_FN(name, 2, T, R, expr, )

/* name_f32 and name_f64; name_i64 and name_i32; the same of unsigned words, for arithmetic that wraps around. */
#define FLOAT_WHERE(name, k, expr, ...)                                                                                \
    TILE_FN(name##_f32, k, float, float, expr, __VA_ARGS__)                                                            \
    TILE_FN(name##_f64, k, double, double, expr, __VA_ARGS__)
#define FLOAT_FN(name, k, expr) FLOAT_WHERE(name, k, expr, )
#define INT_FN(name, k, expr)                                                                                          \
    TILE_FN(name##_i64, k, int64_t, int64_t, expr, )                                                                   \
    TILE_FN(name##_i32, k, int32_t, int32_t, expr, )
#define WRAP_FN(name, k, expr)                                                                                         \
    TILE_FN(name##_i64, k, uint64_t, uint64_t, expr, )                                                                 \
    TILE_FN(name##_i32, k, uint32_t, uint32_t, expr, )

/* --- records ---------------------------------------------------------------------------------------------------------
 * {TILED("Neg", "", 6, 1, NUMBERS, INPLACE_0, infer_same, .fn = {FLOAT_TILES(neg), INT_TILES(neg)}), .grad = grad_neg}:
 * name, domain, since, operands, types, flags, inference, and the members of a pointwise_def. */

#define FLOAT_TILES(name) [TILE_F32] = name##_f32, [TILE_F64] = name##_f64
#define INT_TILES(name) [TILE_I64] = name##_i64, [TILE_I32] = name##_i32
#define TILED(...) TILED_BY(pointwise_cpu, __VA_ARGS__)
/* The same with a kernel that checks something before. */
#define TILED_BY(cpu_, name_, domain_, since_, operands_, types_, flags_, infer_, ...)                                 \
    .name = name_, .domain = domain_, .since = since_, .min_in = operands_, .max_in = operands_, .max_out = 1,         \
    .dtypes = types_, .flags = POINTWISE | STRIDED | (flags_), .infer = infer_, .cpu = cpu_,                           \
    .workspace = pointwise_workspace, .cuda = pointwise_cuda, .pointwise = &(const pointwise_def) {                    \
        __VA_ARGS__                                                                                                    \
    }
/* An operator that is always a composition of others. */
#define LOWERED(name_, domain_, since_, least_, most_, types_, lower_)                                                 \
    .name = name_, .domain = domain_, .since = since_, .min_in = least_, .max_in = most_, .max_out = 1,                \
    .dtypes = types_, .lower = lower_
/* Our operator for the gradient of floats: dy and what else it needs, every one broadcast to dy. */
#define TILED_GRADIENT(name_, operands_, ...)                                                                          \
    TILED(name_, ORT_DOMAIN, 1, operands_, FLOATS, INPLACE_0 | INPLACE_1, infer_same, __VA_ARGS__)

#endif
