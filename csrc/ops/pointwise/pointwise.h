/* pointwise.h -- pointwise operators as functions over tiles.
 *
 * A pointwise operator is one loop over contiguous tiles of a few hundred elements; ops/pointwise/pointwise.c does everything
 * else (broadcasting, strides, narrow types, threads). Narrow types are widened while a tile is loaded and narrowed
 * when it is stored, so each operator is written for float and double only (and int64/int32 where integers make
 * sense). The same functions are the steps of fused chains. */
#ifndef ORT_OPS_POINTWISE_H
#define ORT_OPS_POINTWISE_H

#include "core/parallel.h"
#include "ops/op.h"

enum { TILE = 1024, TILE_OPERANDS = 4, TILE_PARAMS = 4 };

/* What a tile is computed in: F32 for float32, bfloat16, float16; I32 for int32, int16, int8, uint8. */
typedef enum tile_class { TILE_F32, TILE_F64, TILE_I64, TILE_I32, TILE_BOOL, TILE_CLASSES } tile_class;

/* out[i] = f(in[0][i], in[1][i], ...) for i < n. Tiles do not overlap, except that out may equal in[0] or in[1].
 * `param`: the attributes named by the definition, in order. */
typedef void tile_fn(int64_t n, void *out, const void *const *in, const double *param);

typedef struct pointwise_def {
    const char *params[TILE_PARAMS];                    /* attributes handed to the tile function */
    tile_fn *fn[TILE_CLASSES];                          /* by the class of the last operand; NULL: not for that class */
    tile_fn *(*choose)(tile_class from, tile_class to); /* instead of fn, where the output's class matters too */
    /* The last operand of fn is 32 random bits an element, those of the element's place in the stream of the attribute
     * "key", which is params[1]. Only steps of a fused chain are computed so. */
    bool draws;
    /* fn is a gradient of floats: the first operand times a function of the second alone. */
    bool slope;
} pointwise_def;

tile_class tile_class_of(dtype t);
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

/* --- its parts, for kernels that run several tile functions in a row ---------------------------------------------- */

/* An operand seen through the shape of the output, as few dimensions as describe it. */
typedef struct tile_source {
    const char *data;
    dtype type;
    int rank; /* at least 1 */
    int64_t dim[MAX_RANK], stride[MAX_RANK];
    int64_t period; /* it repeats after so many elements, at most TILE; 0: no such number */
} tile_source;

/* Room for a tile, or for a period and a tile, of any class. */
typedef struct tile_buffer {
    _Alignas(64) char bytes[2 * TILE * 8];
} tile_buffer;

/* `t` must broadcast to `to`. */
tile_source tile_source_of(const tensor *t, const shape *to);
/* To be called once before tiles of at most `n` elements are read through `b`. */
void tile_begin(const tile_source *s, int64_t n, tile_buffer *b);
/* Elements [start, start + n) in the class of the type: in the operand's own memory where that can be, else in `b`. */
const void *tile_read(const tile_source *s, int64_t start, int64_t n, tile_buffer *b);
/* Whether elements of `t` are stored as they are computed. */
static inline bool tile_is_native(dtype t) { return t == F32 || t == F64 || t == I64 || t == I32 || t == BOOL; }
/* n elements of a tile into memory, narrowed where the type is not native, and then past the caches if it `streams`. */
void tile_store(dtype t, const void *tile, int64_t n, void *to, bool streams);
/* Whether that is better for a result of these operands. */
bool tile_streams(const tensor *out, const tensor *in, int n_in);
/* What storing a tile as `t` and loading it again leaves of it. */
void tile_round(dtype t, void *tile, int64_t n);
int64_t tile_element(dtype t); /* bytes of an element in a tile */
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
