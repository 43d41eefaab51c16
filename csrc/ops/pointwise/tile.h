/* tile.h -- tiles: a few hundred elements of an operand in a row, in the type in which they are computed. */
#ifndef ORT_OPS_TILE_H
#define ORT_OPS_TILE_H

#include "core/parallel.h"
#include "ops/op.h"

enum { TILE = 1024, TILE_OPERANDS = 4, TILE_PARAMS = 4 };

/* What a tile is computed in: F32 for float32, bfloat16, float16; I32 for int32, int16, int8, uint8. */
typedef enum tile_class { TILE_F32, TILE_F64, TILE_I64, TILE_I32, TILE_BOOL, TILE_CLASSES } tile_class;

/* out[i] = f(in[0][i], in[1][i], ...) for i < n. Tiles do not overlap, except that out may equal in[0] or in[1].
 * `param`: the attributes named by the definition, in order. */
typedef void tile_fn(int64_t n, void *out, const void *const *in, const double *param);

/* What a record says of a pointwise operator: how it computes a tile. */
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

#endif
