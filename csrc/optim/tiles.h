/* tiles.h -- cuts many tensors into tiles, which are shared out among the threads. */
#ifndef ORT_OPTIM_TILES_H
#define ORT_OPTIM_TILES_H

#include "core/dtype.h"

enum { TILE = 2048 };

/* The first member of whatever is cut into tiles. */
typedef struct tiled {
    int64_t count;  /* elements */
    double sums[2]; /* what sum_tiles leaves */
} tiled;

/* Elements [first, first + n) of `thing`, one of `count` things of `size` bytes. `sums` are 0 before. */
typedef void tile_fn(const void *arg, const tiled *thing, int64_t first, int64_t n, double sums[2]);

/* Calls body for every tile. What it leaves in `sums` is lost. */
void for_tiles(tiled *things, int count, size_t size, tile_fn *body, const void *arg);
/* The same, and adds up the sums of each thing's tiles, in an order that does not depend on the number of threads. */
void sum_tiles(tiled *things, int count, size_t size, tile_fn *body, const void *arg);

/* Elements of a stored type as the type that is computed in, float or double, and back. */
typedef void convert_fn(void *to, const void *from, int64_t n);
/* By the stored type; none where it is the type that is computed in. */
typedef struct converters {
    convert_fn *in[DTYPE_COUNT], *out[DTYPE_COUNT];
} converters;
extern const converters for_float, for_double;

static inline void *element_at(void *data, dtype type, int64_t first) {
    return (char *)data + first * (int64_t)dtype_size(type);
}

/* A tensor and the sum of its squares, sums[0], in double: infinite or NaN exactly when an element is (or for float64
 * elements beyond 1e154). */
typedef struct dense {
    tiled tiles;
    dtype type;
    const void *data;
} dense;

void sums_of_squares(dense *tensors, int count);

#endif
