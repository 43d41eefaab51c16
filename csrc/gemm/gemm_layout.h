/* gemm_layout.h -- B laid out before the products that read it, by one of our kernels. */
#ifndef ORT_EXEC_GEMM_LAYOUT_H
#define ORT_EXEC_GEMM_LAYOUT_H

#include "gemm/gemm_packed.h"

typedef struct gemm_layout gemm_layout;

/* gemm_layout_bytes and gemm_lay_out for a kernel that can multiply g->type; of a product with k > 0 and n > 0. */
size_t gemm_layout_bytes_with(const gemm *g, const gemm_kernel *kernel);
void gemm_lay_out_with(const gemm *g, const gemm_kernel *kernel, void *to);

/* What `g` can use of g->laid_b with this kernel, or NULL. */
const gemm_layout *gemm_layout_for(const gemm *g, const gemm_kernel *kernel);
/* Panel `panel` of slice `slice`, which has so many elements along K. */
const uint32_t *gemm_layout_panel(const gemm_layout *x, int64_t slice, int64_t depth, int64_t panel);
/* The largest magnitude in `count` panels. */
uint32_t gemm_layout_largest(const gemm_layout *x, int64_t slice, int64_t panel, int64_t count);

#endif
