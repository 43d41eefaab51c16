/* gemm_prepack.h -- packs B ahead of the products that read it, for one of our kernels. */
#ifndef ORT_GEMM_PREPACK_H
#define ORT_GEMM_PREPACK_H

#include "gemm/gemm_kernel.h"

typedef struct gemm_prepacked gemm_prepacked;

/* gemm_prepack_bytes and gemm_prepack for a kernel that can multiply g->type; of a product with k > 0 and n > 0. */
size_t gemm_prepack_bytes_with(const gemm *g, const gemm_kernel *kernel);
void gemm_prepack_with(const gemm *g, const gemm_kernel *kernel, void *to);

/* What `g` can use of g->packed_b with this kernel, or NULL. */
const gemm_prepacked *gemm_prepacked_for(const gemm *g, const gemm_kernel *kernel);
/* Panel `panel` of slice `slice`, which has so many elements along K. */
const uint32_t *gemm_prepacked_panel(const gemm_prepacked *x, int64_t slice, int64_t depth, int64_t panel);
/* The largest magnitude in `count` panels. */
uint32_t gemm_prepacked_largest(const gemm_prepacked *x, int64_t slice, int64_t panel, int64_t count);

#endif
