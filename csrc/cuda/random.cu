/* random.cu -- twin of ops/random.c: dropout, with the very bits of core/philox.c.
 *
 * A thread has a counter, whose four words belong to four elements 16 apart (the order within a group of 64). Where only
 * some rows are there it has one element, which is dropped or kept as it would be among all rows. */
#ifndef T
#include "cuda/kernel.h"
#include "cuda/philox.h"

typedef struct dropout_args {
    const void *in;
    void *out;
    const int64_t *rows; /* of `width` elements, where not all are there; or NULL */
    int64_t count, width;
    const uint64_t *seed_at; /* or NULL */
    uint64_t seed;
    double scale;
    uint32_t key, threshold;
} dropout_args;

#ifdef ORT_HOST
#include <math.h>

kernel_fn dropout_train_cuda, dropout_mask_cuda;

static status run(ctx *c, const call *k, kernel *f) {
    const double ratio = node_float(k->node, "ratio");
    dropout_args a = {.out = k->out[0].data,
                      .count = tensor_count(&k->out[0]),
                      .seed_at = k->cuda->seed,
                      .seed = k->seed,
                      .key = (uint32_t)node_int(k->node, "key")};

    if (k->n_in) a.in = k->in[0].data;
    if (k->n_in > 1 && tensor_present(&k->in[1])) {
        a.rows = k->in[1].data;
        a.width = shape_span(&k->in[0].shape, 1, k->in[0].shape.rank);
    }
    a.threshold = ratio < 1 ? (uint32_t)fmin(nearbyint(ratio * 0x1p32), 0xFFFFFFFFp0) : 0;
    a.scale = ratio < 1 ? 1 / (1 - ratio) : 0;
    return cuda_launch(c, k, f, geometry_over(a.rows ? a.count : (a.count + 63) / 64 * 16, 256, 256), &a);
}

status dropout_train_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(dropout);
    return run(c, k, &kernels[k->in[0].type]);
}

status dropout_mask_cuda(ctx *c, const call *k) {
    static kernel mask = {.name = "dropout_mask"};
    return run(c, k, &mask);
}
#endif

#ifdef ORT_DEVICE
#define SEED (a.seed_at ? *a.seed_at : a.seed)

KERNEL(dropout_mask, dropout_args) {
    const uint64_t seed = SEED;
    FOR_EACH(counter, (a.count + 63) / 64 * 16) {
        const int64_t first = counter / 16 * 64 + place_of((int)(counter % 16));
        uint32_t word[4];
        draw(seed, a.key, (uint64_t)counter, word);
        for (int j = 0; j < 4; j++)
            if (first + 16 * j < a.count) ((uint8_t *)a.out)[first + 16 * j] = a.scale != 0 && word[j] >= a.threshold;
    }
}

#define TEMPLATE "cuda/random.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(dropout), dropout_args) {
    const A scale = (A)a.scale;
    const uint64_t seed = SEED;

    if (a.rows) {
        FOR_EACH(i, a.count) {
            const int64_t listed = a.rows[i / a.width], row = listed < 0 ? -1 - listed : listed;
            const int keeps = word_of(seed, a.key, row * a.width + i % a.width) >= a.threshold;
            ((T *)a.out)[i] = PUT(GET(((const T *)a.in)[i]) * (keeps ? scale : 0));
        }
        return;
    }
    FOR_EACH(counter, (a.count + 63) / 64 * 16) {
        const int64_t first = counter / 16 * 64 + place_of((int)(counter % 16));
        uint32_t word[4];
        draw(seed, a.key, (uint64_t)counter, word);
        for (int j = 0; j < 4; j++) {
            const int64_t i = first + 16 * j;
            if (i < a.count) ((T *)a.out)[i] = PUT(GET(((const T *)a.in)[i]) * (word[j] >= a.threshold ? scale : 0));
        }
    }
}
#endif
