/* gemm_prepack.c -- packs B's panels for all of a product's columns, slice by slice, once for several products.
 *
 *     head | largest magnitude of each panel | panels of slice 0 | panels of slice 1 | ... */
#include "gemm/gemm_prepack.h"

#include "core/parallel.h"
#include "core/prefetch.h"

#if defined(__x86_64__) && defined(__GNUC__)

struct gemm_prepacked {
    const gemm_kernel *kernel; /* that reads them */
    int64_t n, k, slice;
};

static int64_t panels_of(const gemm_prepacked *x) { return parts(x->n, PANEL_COLS); }

static int64_t slices_of(const gemm_prepacked *x) { return parts(gemm_units(x->kernel, x->k), x->slice); }

static gemm_prepacked prepacked_of(const gemm *g, const gemm_kernel *kn) {
    return (gemm_prepacked){kn, g->n, g->k, gemm_slice(kn, g->k)};
}

static size_t head_bytes(const gemm_prepacked *x) {
    return (size_t)whole((int64_t)sizeof *x + slices_of(x) * panels_of(x) * (int64_t)sizeof(uint32_t), CACHE_LINE);
}

const gemm_prepacked *gemm_prepacked_for(const gemm *g, const gemm_kernel *kernel) {
    const gemm_prepacked *x = g->packed_b;
    return x && x->kernel == kernel && x->n == g->n && x->k == g->k && g->n_batch == 0 ? x : NULL;
}

const uint32_t *gemm_prepacked_panel(const gemm_prepacked *x, int64_t slice, int64_t depth, int64_t panel) {
    const int64_t units = slice * x->slice * panels_of(x) + panel * gemm_units(x->kernel, depth);
    return (const uint32_t *)((const char *)x + head_bytes(x)) + units * PANEL_COLS;
}

uint32_t gemm_prepacked_largest(const gemm_prepacked *x, int64_t slice, int64_t panel, int64_t count) {
    const uint32_t *of = (const uint32_t *)(x + 1) + slice * panels_of(x) + panel;
    uint32_t largest = 0;

    for (int64_t i = 0; i < count; i++)
        if (of[i] > largest) largest = of[i];
    return largest;
}

typedef struct packing {
    const gemm *g;
    gemm_prepacked *to;
} packing;

static void pack_panels(void *arg, int64_t begin, int64_t end) {
    const packing *l = arg;
    const gemm *g = l->g;
    const gemm_kernel *kn = l->to->kernel;
    const int64_t panels = panels_of(l->to), depth = l->to->slice / kn->step_units * kn->step_depth;
    const int64_t size = (int64_t)dtype_size(gemm_type_b(g));
    uint32_t *largest = (uint32_t *)(l->to + 1);

    for (int64_t i = begin; i < end; i++) {
        const int64_t slice = i / panels, col = i % panels * PANEL_COLS, k = slice * depth;
        const int64_t deep = least(depth, g->k - k), cols = least(PANEL_COLS, g->n - col);
        uint32_t *to = (uint32_t *)gemm_prepacked_panel(l->to, slice, deep, i % panels);
        largest[i] = kn->pack_b(to, (const char *)g->b + (col * g->b_col + k * g->b_row) * size, gemm_type_b(g), cols,
                                deep, g->b_col, g->b_row);
    }
}

size_t gemm_prepack_bytes_with(const gemm *g, const gemm_kernel *kernel) {
    const gemm_prepacked x = prepacked_of(g, kernel);
    const int64_t words = gemm_units(kernel, g->k) * panels_of(&x) * PANEL_COLS;
    return head_bytes(&x) + (size_t)words * sizeof(uint32_t);
}

void gemm_prepack_with(const gemm *g, const gemm_kernel *kernel, void *to) {
    gemm_prepacked *x = to;

    *x = prepacked_of(g, kernel);
    parallel_for(slices_of(x) * panels_of(x), parallel_rows(PANEL_COLS * x->slice), pack_panels, &(packing){g, x});
}

#endif
