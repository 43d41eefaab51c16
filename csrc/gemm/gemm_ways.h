/* gemm_ways.h -- names the implementations that multiply, and declares those that are our own. */
#ifndef ORT_GEMM_WAYS_H
#define ORT_GEMM_WAYS_H

#include "gemm/gemm_product.h"

/* The ways there are to multiply. GEMM_DEFAULT: the first of gemm.c's order that can and pays. */
typedef enum gemm_way {
    GEMM_DEFAULT,
    GEMM_PACKED_F32,  /* our own with packed panels (gemm_packed.c), by inner kernel */
    GEMM_PACKED_BF16, /* AVX-512-BF16 */
    GEMM_PACKED_AMX,
    GEMM_PACKED_AMX_F32, /* float32 */
    GEMM_BLAS,           /* as torch carries it */
    GEMM_TORCH,          /* torch's 16-bit product */
    GEMM_REFERENCE,
    GEMM_WAYS,
} gemm_way;

/* Our own with AVX-512 and AMX (gemm_packed.c), by the best kernel or that of one way: false, with nothing done, where it
 * cannot; whether it is faster than a library. */
bool gemm_packed(gemm *g);
bool gemm_packed_by(gemm_way way, gemm *g);
gemm_way gemm_packed_way(const gemm *g); /* of the best kernel; GEMM_DEFAULT: there is none */
bool gemm_packed_pays(const gemm *g);
/* Whether sums of this 16-bit type can be left in float32 (wide_c) without the reference. */
bool gemm_sums_wide(dtype type);
/* Whether float32 operands can be rounded to this 16-bit type (wide_a, wide_b) without it. */
bool gemm_rounds(dtype type);

/* B packed as our own kernel for this product reads it, for all products by it with as many columns and any rows: bytes, 64-byte
 * aligned; 0: no such kernel, or it does not pay. Only `a` and `c` may be NULL. The sums are the same bit by bit. */
size_t gemm_prepack_bytes(const gemm *g);
void gemm_prepack(const gemm *g, void *to);

/* The last implementation (gemm_reference.c): any type, any strides. */
void gemm_reference(const gemm *g);

#endif
