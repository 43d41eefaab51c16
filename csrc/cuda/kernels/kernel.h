/* kernel.h -- declares what every .cu file of this folder includes, on whichever side it is compiled.
 *
 * A family is one file. It is compiled twice: by the C compiler, which sees the part under ORT_HOST (the functions of
 * records: they fill a structure and start a kernel), and as kernels, which are the part under ORT_DEVICE. That part
 * is written in what C and CUDA have in common, so nvcc compiles it for GPUs and a C compiler for the emulator of
 * tests/cuda, one fiber a thread.
 *
 *     typedef struct scale_args { const float *x; float *y; int64_t count; } scale_args;      both sides
 *     KERNEL(scale_f32, scale_args) { FOR_EACH(i, a.count) a.y[i] = 2 * a.x[i]; }              ORT_DEVICE
 *
 * A kernel has one argument, the structure `a`. Blocks have one dimension, a multiple of WARP threads long. */
#ifndef ORT_CUDA_KERNEL_H
#define ORT_CUDA_KERNEL_H

#ifdef ORT_HOST
#include "cuda/host/driver.h"
#include "cuda/host/named.h"
#endif

#ifdef ORT_DEVICE

#include "cuda/kernels/fault.h"

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define KERNEL(name, args) extern "C" __global__ void name(const __grid_constant__ args a)
#define DEVICE static __device__ __forceinline__
#define FAR static __device__ __noinline__ /* of use to many kernels, and long */
#define SHARED(type, name, count) __shared__ type name[count]
#define UNROLL _Pragma("unroll")
#define NOT_UNROLLED _Pragma("unroll 1") /* of what runs rarely */
#else
#include "emulate.h"
#define UNROLL
#define NOT_UNROLLED
#endif

enum { MAX_RANK = 8, WARP = 32 };

/* core/dtype.h, which C++ cannot read; the host checks that they are the same. */
typedef enum dtype { DT_NONE, F32, F64, BF16, F16, I64, I32, I16, I8, U8, BOOL, DTYPE_COUNT } dtype;
typedef uint16_t bf16, f16; /* their bits */

/* Elements or rows of a launch, shared out over its threads, and over its blocks. */
#define FOR_EACH(i, count)                                                                                             \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step_##i = (int64_t)gridDim.x * blockDim.x;       \
         i < (count); i += step_##i)
#define FOR_BLOCKS(i, count) for (int64_t i = blockIdx.x; i < (count); i += gridDim.x)
/* Elements of something that a block shares out over its threads. */
#define FOR_THREADS(i, count) for (int64_t i = threadIdx.x; i < (count); i += blockDim.x)

/* For templates of any type: no integer is. */
#define IS_NAN(x) ((x) != (x))

/* a b rounded before it is added to a number: a compiler makes one instruction of both where it likes, and code that differs
 * in other ways would get other bits. And a b + c, rounded once. */
#ifdef __CUDACC__
DEVICE float times_f32(float a, float b) { return __fmul_rn(a, b); }
DEVICE double times_f64(double a, double b) { return __dmul_rn(a, b); }
#else
#define TIMES(name, R)                                                                                                 \
    DEVICE R name(R a, R b) {                                                                                          \
        volatile R product = a * b;                                                                                    \
        return product;                                                                                                \
    }
TIMES(times_f32, float)
TIMES(times_f64, double)
#endif

/* --- places ------------------------------------------------------------------------------------------------------- */

/* x / by of numbers that are not negative: in 32 bits where they fit, since 64 take a subroutine, some ten times as long,
 * which is kept out of the way. */
FAR __attribute__((unused)) int64_t wide_quotient(int64_t x, int64_t by) {
    return (int64_t)((uint64_t)x / (uint64_t)by);
}
DEVICE int64_t quotient(int64_t x, int64_t by) {
    if (((uint64_t)x | (uint64_t)by) >> 32) return wide_quotient(x, by);
    return (int64_t)((uint32_t)x / (uint32_t)by);
}
DEVICE int64_t remainder_of(int64_t x, int64_t by) { return x - quotient(x, by) * by; }

/* Where element i of `n` dimensions is, the first of which is the innermost. */
DEVICE int64_t place_along(int64_t i, int n, const int64_t *dim, const int64_t *step) {
    int64_t at = 0;
    for (int d = 0; d < n; d++) {
        const int64_t next = quotient(i, dim[d]);
        at += (i - next * dim[d]) * step[d];
        i = next;
    }
    return at;
}

/* Where a lane begins: `length` elements along an axis, `step` apart. A macro, since of an inlined function nvcc makes
 * one more division. */
#define LANE_START(lane, length, step) ((lane) / (step) * (length) * (step) + (lane) % (step))

/* --- 16-bit floats, with the bits of core/dtype.h ----------------------------------------------------------------- */

DEVICE float bits_to_f32(uint32_t u) {
    union {
        uint32_t u;
        float f;
    } v;
    v.u = u;
    return v.f;
}

DEVICE uint32_t f32_to_bits(float f) {
    union {
        uint32_t u;
        float f;
    } v;
    v.f = f;
    return v.u;
}

DEVICE float bf16_to_f32(bf16 x) { return bits_to_f32((uint32_t)x << 16); }

/* To the nearest, ties to even; a NaN stays the one that it is, made quiet. The instruction would make all NaNs one. */
DEVICE bf16 f32_to_bf16(float x) {
    const uint32_t u = f32_to_bits(x);
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 800
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
#else
    const bf16 rounded = (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
    return (u & 0x7fffffffu) > 0x7f800000u ? (bf16)((u | 0x400000u) >> 16) : rounded;
}

#ifdef __CUDACC__
DEVICE float f16_to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

DEVICE f16 f32_to_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#else
__extension__ typedef _Float16 half;
DEVICE float f16_to_f32(f16 x) {
    union {
        f16 u;
        half f;
    } v;
    v.u = x;
    return (float)v.f;
}

DEVICE f16 f32_to_f16(float x) {
    union {
        f16 u;
        half f;
    } v;
    v.f = (half)x;
    return v.u;
}
#endif

/* --- what threads of a block do together -------------------------------------------------------------------------- */

/* Sum and maximum over a block, in an order that depends on its size alone; every thread gets it. */
#define WARP_REDUCE(name, T, combine)                                                                                  \
    DEVICE T name(T x) {                                                                                               \
        for (int step = WARP / 2; step > 0; step /= 2) {                                                               \
            const T y = __shfl_xor_sync(0xffffffffu, x, step);                                                         \
            x = combine;                                                                                               \
        }                                                                                                              \
        return x;                                                                                                      \
    }
#define BLOCK_REDUCE(name, T, start, reduce_warp)                                                                      \
    DEVICE T name(T x) {                                                                                               \
        SHARED(T, parts, WARP);                                                                                        \
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;                     \
        x = reduce_warp(x);                                                                                            \
        if (warps == 1) {                                                                                              \
            __syncwarp(); /* as a barrier does: what was read before may be written after */                           \
            return x;                                                                                                  \
        }                                                                                                              \
        __syncthreads(); /* what an earlier reduction left has been read */                                            \
        if (lane == 0) parts[warp] = x;                                                                                \
        __syncthreads();                                                                                               \
        return reduce_warp(lane < warps ? parts[lane] : (T)(start));                                                   \
    }

WARP_REDUCE(warp_sum_f32, float, x + y)
WARP_REDUCE(warp_sum_f64, double, x + y)
WARP_REDUCE(warp_max_f32, float, x > y ? x : y)
WARP_REDUCE(warp_max_f64, double, x > y ? x : y)
BLOCK_REDUCE(block_sum_f32, float, 0, warp_sum_f32)
BLOCK_REDUCE(block_sum_f64, double, 0, warp_sum_f64)
BLOCK_REDUCE(block_max_f32, float, -INFINITY, warp_max_f32)
BLOCK_REDUCE(block_max_f64, double, -INFINITY, warp_max_f64)

/* An element of any float type, and of any integer type. */
#define NUMBER(name, R)                                                                                                \
    DEVICE R name(const void *p, int type, int64_t i) {                                                                \
        return type == F32    ? (R)((const float *)p)[i]                                                               \
               : type == F64  ? (R)((const double *)p)[i]                                                              \
               : type == BF16 ? (R)bf16_to_f32(((const bf16 *)p)[i])                                                   \
                              : (R)f16_to_f32(((const f16 *)p)[i]);                                                    \
    }
NUMBER(number_f32, float)
NUMBER(number_f64, double)

DEVICE int64_t integer_at(const void *p, int type, int64_t i) {
    return type == I64   ? ((const int64_t *)p)[i]
           : type == I32 ? ((const int32_t *)p)[i]
           : type == I16 ? ((const int16_t *)p)[i]
           : type == I8  ? ((const int8_t *)p)[i]
                         : ((const uint8_t *)p)[i];
}

/* An element of any float type becomes x. */
DEVICE void set_number(void *p, int type, int64_t i, double x) {
    if (type == F32) ((float *)p)[i] = (float)x;
    else if (type == F64) ((double *)p)[i] = x;
    else if (type == BF16) ((bf16 *)p)[i] = f32_to_bf16((float)x);
    else ((f16 *)p)[i] = f32_to_f16((float)x);
}

/* An element of any integer type becomes x, without what does not fit. */
DEVICE void set_integer(void *p, int type, int64_t i, int64_t x) {
    if (type == I64) ((int64_t *)p)[i] = x;
    else if (type == I32) ((int32_t *)p)[i] = (int32_t)x;
    else if (type == I16) ((int16_t *)p)[i] = (int16_t)x;
    else ((uint8_t *)p)[i] = (uint8_t)x;
}

/* The first report since the host looked is kept. */
DEVICE void report(cuda_fault *fault, int kind, int node, int64_t value, int64_t limit) {
    if (atomicCAS(&fault->claimed, 0, 1) != 0) return;
    fault->value = value;
    fault->limit = limit;
    fault->node = node;
    __threadfence_system();
    *(volatile int32_t *)&fault->kind = kind;
}

#endif /* ORT_DEVICE */

#ifdef ORT_HOST
_Static_assert(F32 == 1 && F64 == 2 && BF16 == 3 && F16 == 4 && I64 == 5 && I32 == 6 && I16 == 7 && I8 == 8 &&
                   U8 == 9 && BOOL == 10 && MAX_RANK == 8,
               "kernel.h repeats core/dtype.h and core/shape.h");
/* The kernels of each_float.h by the type of their elements. */
#define FLOAT_KERNELS(f) {[F32] = {#f "_f32"}, [F64] = {#f "_f64"}, [BF16] = {#f "_bf16"}, [F16] = {#f "_f16"}}
#endif

#endif
