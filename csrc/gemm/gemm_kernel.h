/* gemm_kernel.h -- joins the driver of our own products (gemm_packed.c) to its inner kernels, one file a CPU feature.
 *
 * Operands are packed in units of 32 bits along K: a float, or two neighbouring bfloat16; or three units are the three
 * bfloat16 that each of two neighbouring floats is the sum of. A *panel* of A holds `rows` rows and one of B PANEL_COLS
 * columns, unit by unit; places beyond the operand's edge are zeros. */
#ifndef ORT_GEMM_KERNEL_H
#define ORT_GEMM_KERNEL_H

#include "core/ints.h"
#include "gemm/gemm_ways.h"

enum { PANEL_COLS = 32 };

/* What is asked for while a block is multiplied: with each step_depth along K `lines` lines of so many bytes, the first of
 * them `step` bytes on each time. */
typedef struct gemm_ahead {
    const char *at;
    int64_t lines, line, bytes, step;
} gemm_ahead;

/* Where a block of sums goes: c = alpha * (sum + more) + beta * c. */
typedef struct gemm_target {
    void *c;
    dtype type; /* of C: F32, BF16, F16 */
    int64_t row;
    const float *more; /* sums of what came before along K, or NULL */
    int64_t more_row;
    float alpha, beta;
    bool keeps_a; /* A's panel is read again soon, by the next block; else B's is */
    gemm_ahead ahead;
} gemm_target;

/* Packs `lines` rows of A, or columns of B, of `depth` elements of type `from`, in units of the kernel's. Returns, of
 * a kernel with `holds`, the largest magnitude, as bits of a bfloat16. */
typedef uint32_t gemm_pack_fn(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step);

typedef struct gemm_kernel {
    int rows;         /* of a panel of A */
    int step_units;   /* the units of a panel are a multiple of this: */
    int step_depth;   /* so many elements along K are in as many units */
    int most_units;   /* what a slice of K has at most, of several; */
    int one_slice;    /* so many units are one slice */
    int panels;       /* of B that are packed at once, at most */
    int asks;         /* lines of the cache that are asked for in a step, at most; 0: run() leaves target.ahead */
    bool apart;       /* sums of several slices are kept beside C even where C has floats */
    int room, room_a; /* words for a block of A and sums beside C, and how many of them A may have */
    bool (*can)(void);
    gemm_pack_fn *pack_a, *pack_b; /* panels one after another */
    /* Whether sums are what they have to be, given the largest elements of A and B, or `other` has to make them; NULL:
     * they always are. */
    bool (*holds)(uint32_t a, uint32_t b, int64_t depth);
    const struct gemm_kernel *other;
    /* One block of at most rows x PANEL_COLS. */
    void (*run)(int64_t units, const uint32_t *a, const uint32_t *b, int64_t rows, int64_t cols, const gemm_target *t);
    void (*enter)(void), (*leave)(void); /* around blocks, on the thread that runs them; or NULL */
} gemm_kernel;

/* The product with one kernel, which must be one that can multiply g->type and reads A and B as they are. */
void gemm_packed_with(const gemm *g, const gemm_kernel *kernel);

/* Units of so many elements along K, and of a slice of K, all but the last. */
static inline int64_t gemm_units(const gemm_kernel *kernel, int64_t depth) {
    return parts(depth, kernel->step_depth) * kernel->step_units;
}

static inline int64_t gemm_slice(const gemm_kernel *kernel, int64_t k) {
    const int64_t units = gemm_units(kernel, k),
                  slices = units <= kernel->one_slice ? 1 : parts(units, kernel->most_units);
    return whole(parts(units, slices), kernel->step_units);
}

#if defined(__x86_64__) && defined(__GNUC__)
extern const gemm_kernel gemm_kernel_f32;     /* AVX-512; operands of any float type but float64, widened */
extern const gemm_kernel gemm_kernel_bf16;    /* AVX-512-BF16; bfloat16, and float32 that is rounded to it */
extern const gemm_kernel gemm_kernel_amx;     /* AMX-BF16; the same */
extern const gemm_kernel gemm_kernel_amx_f32; /* AMX-BF16 for float32, as precise */
#endif

#endif
