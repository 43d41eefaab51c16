/* cast.cu -- Cast between float32 and 16-bit floats that lie together: under autocast every weight, once a step. A thread
 * has ROW_PIECE elements. pointwise.cu has all other casts. */
#include "cuda/kernels/cast.h"
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct cast_args {
    const void *x;
    void *y;
    int64_t count;
    int32_t from, to;
} cast_args;

#ifdef ORT_HOST
static bool is_float(dtype t) { return t == F32 || t == BF16 || t == F16; }

bool cast_is_dense(const tensor *x, const tensor *y) {
    return is_float(x->type) && is_float(y->type) && tensor_contiguous(x) && tensor_contiguous(y);
}

status cast_dense(ctx *c, const call *k) {
    static kernel cast = {.name = "cast_floats"};
    const tensor *x = &k->in[0], *y = &k->out[0];
    const cast_args a = {x->data, y->data, tensor_count(y), x->type, y->type};

    return cuda_launch(c, k, &cast, geometry_over(a.count, ROW_PIECE * 256, 256), &a);
}
#endif

#ifdef ORT_DEVICE
KERNEL(cast_floats, cast_args) {
    const int pieces = IS_ALIGNED(a.x, a.from) && IS_ALIGNED(a.y, a.to);

    FOR_EACH(group, (a.count + AT_ONCE - 1) / AT_ONCE) {
        const int64_t i = group * AT_ONCE;
        if (pieces && i + AT_ONCE <= a.count) {
            float x[AT_ONCE];
            read_float(a.x, a.from, i, x);
            write_float(a.y, a.to, i, x);
            continue;
        }
        for (int64_t j = i; j < i + AT_ONCE && j < a.count; j++) set_float(a.y, a.to, j, get_float(a.x, a.from, j));
    }
}
#endif
